"""Logits of a step -> token ids, log-probabilities, and requests that failed by themselves. Engine thread.

A token depends on its own request alone (its logits, parameters, seed and position), so the same seed gives the same
text whatever the batch. Tensors of parameters are kept while the batch's composition is unchanged, and every feature
costs only the rows that asked for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from slipstream_kernels import ops

from slipstream.core.outputs import TokenLogprobs
from slipstream.core.request import Request
from slipstream.runtime.guided import GuideMasks
from slipstream.runtime.logit_edits import SparseEdits, add_edits, has_sparse_edits
from slipstream.runtime.logprobs import token_logprobs
from slipstream.runtime.penalties import TokenHistory

T = TypeVar("T")


@dataclass(slots=True)
class Sampled:
    """Aligned with the requests given to `sample`. failures: requests whose own part went wrong, and why; their
    tokens mean nothing."""

    token_ids: list[int]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # request_id -> the drawn token's
    failures: list[tuple[Request, str]] = field(default_factory=list)


class _Draws(NamedTuple):
    """Arguments of ops.sample, [num_rows] each."""

    temperature: torch.Tensor
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None
    seeds: torch.Tensor


class _Penalties(NamedTuple):
    """Arguments of ops.apply_penalties, [number of penalised rows] each."""

    prompt_lens: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


@dataclass(slots=True)
class _Composition:
    """What is the same in every step that samples the same requests in the same order: which rows need what."""

    request_ids: list[int]
    is_greedy: bool
    edited: list[int]
    penalised: list[int]
    guided: list[int]
    with_logprobs: list[int]
    draws: _Draws
    penalties: _Penalties  # of the penalised rows


class Sampler:
    """One per runner; vocab_size is the width of the logits."""

    def __init__(self, vocab_size: int, max_model_len: int, device: torch.device) -> None:
        self._device = device
        self._history = TokenHistory(max_model_len, device)
        self._masks = GuideMasks(vocab_size, device)
        self._composition: _Composition | None = None

    def sample(self, requests: list[Request], logits: torch.Tensor) -> Sampled:
        """Draw one token per request. logits: [len(requests), vocab] fp32, changed in place.

        Log-probabilities are of the unchanged logits.
        """
        rows = self._compose(requests)
        sampled = Sampled([])
        original = logits[rows.with_logprobs] if rows.with_logprobs else None  # a copy: taken before the edits
        self._edit(requests, logits, rows, sampled)
        token_ids = self._draw(requests, logits, rows)
        if original is not None:
            chosen = [requests[row] for row in rows.with_logprobs]
            num_top = [request.params.logprobs or 0 for request in chosen]
            found = token_logprobs(original, token_ids[rows.with_logprobs], num_top)
            sampled.logprobs = {request.request_id: [entry] for request, entry in zip(chosen, found)}
        sampled.token_ids = token_ids.tolist()  # the step's one wait for the device
        return sampled

    def _compose(self, requests: list[Request]) -> _Composition:
        request_ids = [request.request_id for request in requests]
        if self._composition is None or self._composition.request_ids != request_ids:
            penalised = _where(requests, lambda request: request.params.has_penalties)
            self._composition = _Composition(
                request_ids=request_ids,
                is_greedy=all(request.params.is_greedy for request in requests),
                edited=_where(requests, has_sparse_edits),
                penalised=penalised,
                guided=_where(requests, lambda request: request.guide_state is not None),
                with_logprobs=_where(requests, lambda request: request.params.logprobs is not None),
                draws=self._draw_parameters(requests),
                penalties=self._penalties([requests[row] for row in penalised]),
            )
        return self._composition

    def _draw_parameters(self, requests: list[Request]) -> _Draws:
        """A filter that no request uses is None, which spares its work for all."""
        params = [request.params for request in requests]
        top_k, top_p, min_p = [max(0, p.top_k) for p in params], [p.top_p for p in params], [p.min_p for p in params]
        return _Draws(
            temperature=self._floats([p.temperature for p in params]),
            top_k=self._ints(top_k, torch.int32) if any(top_k) else None,
            top_p=self._floats(top_p) if min(top_p) < 1.0 else None,
            min_p=self._floats(min_p) if any(min_p) else None,
            seeds=self._ints([_signed(request.seed) for request in requests], torch.int64),
        )

    def _penalties(self, requests: list[Request]) -> _Penalties:
        params = [request.params for request in requests]
        return _Penalties(
            prompt_lens=self._ints([request.num_prompt_tokens for request in requests], torch.int32),
            repetition=self._floats([p.repetition_penalty for p in params]),
            presence=self._floats([p.presence_penalty for p in params]),
            frequency=self._floats([p.frequency_penalty for p in params]),
        )

    def _edit(self, requests: list[Request], logits: torch.Tensor, rows: _Composition, sampled: Sampled) -> None:
        """Penalties, then biases and bans, then guides, each on its rows only, in place."""
        if rows.penalised:
            penalised = [requests[row] for row in rows.penalised]
            num_tokens = self._ints([request.num_tokens for request in penalised], torch.int32)
            part = logits[rows.penalised]  # a copy
            ops.apply_penalties(
                part,
                self._history.update(penalised),
                rows.penalties.prompt_lens,
                num_tokens,
                repetition=rows.penalties.repetition,
                presence=rows.penalties.presence,
                frequency=rows.penalties.frequency,
            )
            logits[rows.penalised] = part
        if rows.edited:
            edits = SparseEdits()
            for row in rows.edited:
                add_edits(edits, row, requests[row])
            edits.apply(logits)
        if rows.guided:
            sampled.failures += self._masks.apply(logits, requests, rows.guided)

    def _draw(self, requests: list[Request], logits: torch.Tensor, rows: _Composition) -> torch.Tensor:
        if rows.is_greedy:
            return logits.argmax(dim=-1)
        positions = self._ints([request.num_tokens for request in requests], torch.int64)
        return ops.sample(logits, *rows.draws, positions)

    def _floats(self, values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).to(self._device, non_blocking=True)

    def _ints(self, values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)


def _where(requests: list[T], wanted: Callable[[T], bool]) -> list[int]:
    return [row for row, request in enumerate(requests) if wanted(request)]


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >= 1 << 63 else seed
