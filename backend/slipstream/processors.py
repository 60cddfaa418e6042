"""Logits processors that come with Slipstream. The operator names them in `logits_processors`: none runs by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slipstream.worker.sample.named_processors import ProcessorContext, ProcessorRow


class NoRepeatNgram:
    """Bans tokens that would repeat a sequence of `size` tokens: TensorRT-LLM's `no_repeat_ngram_size`.

    kwargs: size, an integer from 1 to 64.
    """

    def __init__(self, context: ProcessorContext) -> None:
        self._device = context.device

    @staticmethod
    def validate(kwargs: Mapping[str, Any]) -> None:
        size = kwargs.get("size")
        if set(kwargs) != {"size"} or not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 64:
            raise ValueError('accepted: {"size": n}, an integer from 1 to 64')

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> None:
        banned = [
            (index, token_id)
            for index, row in enumerate(rows)
            for token_id in self._repeats([*row.prompt_token_ids, *row.output_token_ids], row.kwargs["size"])
        ]
        if banned:
            where = torch.tensor(banned, device=self._device).T
            logits[where[0], where[1]] = -torch.inf

    @staticmethod
    def _repeats(token_ids: list[int], size: int) -> set[int]:
        """Tokens that have followed the last size - 1 tokens before."""
        if size == 1:
            return set(token_ids)
        last = token_ids[1 - size :]
        ends = range(size - 1, len(token_ids))
        return {
            token_ids[end] for end in ends if token_ids[end - 1] == last[-1] and token_ids[end - size + 1 : end] == last
        }


class TopNSigma:
    """Keeps the tokens whose logits are within n standard deviations of the largest (arXiv:2411.07641).

    kwargs: n, a number from 0 (greedy) to 100.
    """

    def __init__(self, context: ProcessorContext) -> None:
        self._device = context.device

    @staticmethod
    def validate(kwargs: Mapping[str, Any]) -> None:
        n = kwargs.get("n")
        if set(kwargs) != {"n"} or not isinstance(n, int | float) or isinstance(n, bool) or not 0 <= n <= 100:
            raise ValueError('accepted: {"n": x}, a number from 0 (greedy) to 100')

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> torch.Tensor:
        n = torch.tensor([row.kwargs["n"] for row in rows], dtype=logits.dtype, device=self._device)
        least = logits.amax(dim=1) - n * logits.std(dim=1)
        return logits.masked_fill(logits < least[:, None], -torch.inf)
