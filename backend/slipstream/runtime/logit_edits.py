"""What changes logits before a token is drawn: biases, bans of words, and of whatever would stop a text too early.

Engine thread. What a request asks once for all (up to a bias per token of the vocabulary) is made a tensor when the
request first samples, what depends on its text is worked out every step. Everything is per row and depends on that
row's request alone: never on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from slipstream_kernels import ops

from slipstream.core.request import Request
from slipstream.runtime.host_copy import to_device
from slipstream.runtime.penalties import Paths

# Finite, unlike a guide's -inf: where a guide leaves nothing but banned tokens (the text must end, min_tokens says not
# yet), the guide wins and there still is something to draw.
BANNED = -1e30


class _Edits(NamedTuple):
    """fixed: token ids and values, on the device. words: bad words of several tokens, by their last token but one."""

    token_ids: torch.Tensor
    values: torch.Tensor
    words: dict[int, list[tuple[int, ...]]]


class LogitEdits:
    """One per sampler: the edits of the requests that sample together, kept while they do.

    vocab_size: the width of the logits. Raises AssertionError for a token outside it, which intake.py has refused.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._edits: dict[int, _Edits] = {}  # by request_id
        self._rows: list[int] = []
        self._fixed: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # rows, token ids, values

    def compose(self, requests: list[Request]) -> bool:
        """Take the requests of the steps to come, in row order; returns whether any asks for edits."""
        self._rows = [row for row, request in enumerate(requests) if has_edits(request)]
        known = self._edits
        self._edits = {
            request.request_id: known.get(request.request_id) or self._read(request)
            for request in (requests[row] for row in self._rows)
        }
        parts = [(row, self._edits[requests[row].request_id]) for row in self._rows]
        parts = [(row, edits) for row, edits in parts if edits.token_ids.numel()]
        self._fixed = None
        if parts:
            rows = [torch.full_like(edits.token_ids, row) for row, edits in parts]
            token_ids, values = [edits.token_ids for _, edits in parts], [edits.values for _, edits in parts]
            self._fixed = torch.cat(rows), torch.cat(token_ids), torch.cat(values)
        return bool(self._rows)

    def apply(self, logits: torch.Tensor, requests: list[Request], paths: Paths | None = None) -> None:
        """Edit in place. logits: [num_rows, vocab] fp32; requests: those of the last `compose`.

        paths: the drafts that each row has beyond its request's tokens.
        """
        if self._fixed is not None:
            ops.apply_bias(logits, *self._fixed)
        places = [
            (row, token_id)
            for row in self._rows
            for token_id in self._banned_now(requests[row], paths[row] if paths else ())
        ]
        if places:
            self._check([token_id for _, token_id in places])
            flat = to_device([number for place in zip(*places) for number in place], torch.int64, self._device)
            rows, token_ids = flat.view(2, -1)
            ops.apply_bias(logits, rows, token_ids, torch.full_like(rows, BANNED, dtype=torch.float32))

    def _read(self, request: Request) -> _Edits:
        """What stays the same for all of a request's tokens."""
        values: dict[int, float] = {}
        for token_id, bias in request.params.logit_bias:
            values[token_id] = values.get(token_id, 0.0) + bias
        words: dict[int, list[tuple[int, ...]]] = {}
        for word in request.params.bad_words_ids:
            if len(word) == 1:
                values[word[0]] = BANNED
            else:
                words.setdefault(word[-2], []).append(word)
        self._check(values)
        token_ids = to_device(list(values), torch.int64, self._device)
        return _Edits(token_ids, to_device(list(values.values()), torch.float32, self._device), words)

    def _banned_now(self, request: Request, path: tuple[int, ...]) -> set[int]:
        """Tokens that the one after the request's own and the drafts of `path` must not be.

        A bad word of several tokens bans its last where the text ends with the others. While fewer than min_tokens are
        there, whatever token would stop the request is banned.
        """
        banned: set[int] = set()
        words = self._edits[request.request_id].words
        if words and (request.num_output_tokens or path):
            last = words.get(path[-1] if path else request.token_ids[-1], ())
            banned.update(word[-1] for word in last if _ends_with(request, path, word[:-1]))
        num_drawn = request.num_drawn_tokens + len(path)
        if num_drawn <= request.params.min_tokens and request.stop_conditions is not None:
            banned |= request.stop_conditions.token_ids
        return banned

    def _check(self, token_ids: Iterable[int]) -> None:
        """Here, because the kernel cannot say it without being waited for."""
        assert all(0 <= token_id < self._vocab_size for token_id in token_ids), "an edit outside the vocabulary"


def has_edits(request: Request) -> bool:
    params = request.params
    return bool(params.logit_bias or params.bad_words_ids or params.min_tokens)


def _ends_with(request: Request, path: tuple[int, ...], token_ids: tuple[int, ...]) -> bool:
    """Whether output and path end with token_ids."""
    if request.num_output_tokens + len(path) < len(token_ids):
        return False
    return (*request.token_ids[-len(token_ids) :], *path)[-len(token_ids) :] == token_ids
