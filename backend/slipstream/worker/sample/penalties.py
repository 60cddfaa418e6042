"""Token history of penalised requests: a device table kept between steps, to which a step adds its new tokens.

Engine thread. If the row of a request was reclaimed meanwhile, its tokens are copied again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.worker.host_copy import to_device
from slipstream.worker.input_batch import SampledTokens
from slipstream.worker.request_state import RequestState

_FEW = 16  # up to this many new tokens of a request are written in one operation with those of others
Paths = Sequence[tuple[int, ...]]  # per row: the drafts that lead to it


@dataclass(slots=True)
class _Row:
    index: int
    num_tokens: int = 0  # of request.token_ids, copied so far


class TokenHistory:
    """Rows grow with the number of penalised requests in one step; a row takes 4 bytes x max_model_len."""

    def __init__(self, max_model_len: int, device: torch.device) -> None:
        self._table = torch.zeros(0, max_model_len, dtype=torch.int32, device=device)
        self._rows: dict[int, _Row] = {}
        self._free: list[int] = []

    def update(
        self, requests: list[RequestState], sampled: SampledTokens | None = None, paths: Paths | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Returns [len(requests), longest] int32, prompt and output of each request, and their lengths; entries past a
        length are undefined. sampled: the step before, for tokens that the host does not know yet.

        paths: per row (a request may have several), the drafts after its request's tokens.
        """
        rows = [self._row(request, requests) for request in requests]
        known: list[tuple[int, int, int]] = []
        pending: list[tuple[int, int, int]] = []
        copied: dict[int, int] = {}
        for request, row in zip(requests, rows):
            self._catch_up(request, row, copied)
            start, end = row.num_tokens, request.num_tokens
            known += [(row.index, start + i, token_id) for i, token_id in enumerate(request.token_ids[start:])]
            row.num_tokens = request.num_prompt_tokens + request.num_drawn_tokens - 1  # not yet the one being drawn
            if row.num_tokens > end:
                assert sampled is not None, "a token that is not known, and no step that samples it"
                pending.append((row.index, end, sampled.rows[request.sequence_id]))
        if known:
            self._put(*self._columns(known))
        if pending:
            assert sampled is not None
            row_of, column_of, index = self._columns(pending)
            self._put(row_of, column_of, sampled.token_ids[index])
        order = to_device([row.index for row in rows], torch.int64, self._table.device)
        num_tokens = [row.num_tokens for row in rows]
        if paths is None:
            return self._table[order, : max(num_tokens)], num_tokens
        lengths = [count + len(path) for count, path in zip(num_tokens, paths)]
        history = torch.nn.functional.pad(self._table[order, : max(num_tokens)], (0, max(lengths) - max(num_tokens)))
        drafts = [
            (row, count + i, token_id)
            for row, (count, path) in enumerate(zip(num_tokens, paths))
            for i, token_id in enumerate(path)
        ]
        if drafts:
            row_of, column_of, token_ids = self._columns(drafts)
            history.index_put_((row_of, column_of), token_ids.int())
        return history, lengths

    def _catch_up(self, request: RequestState, row: _Row, copied: dict[int, int]) -> None:
        """Copy a prompt or a long output as one tensor: 100,000 tokens one by one would delay the step of all requests.

        copied: id of a prompt's list, which the n sequences of a client request share -> the row that holds it.
        """
        device, prompt = self._table.device, request.prompt_token_ids
        if row.num_tokens == 0:
            first = copied.setdefault(id(prompt), row.index)
            tokens = self._table[first, : len(prompt)] if first != row.index else to_device(prompt, torch.int32, device)
            self._table[row.index, : len(prompt)] = tokens
            row.num_tokens = len(prompt)
        if request.num_tokens - row.num_tokens > _FEW:
            tokens = to_device(request.token_ids[row.num_tokens :], torch.int32, device)
            self._table[row.index, row.num_tokens : request.num_tokens] = tokens
            row.num_tokens = request.num_tokens

    def _columns(self, indices: list[tuple[int, int, int]]) -> tuple[torch.Tensor, ...]:
        flat = [number for column in zip(*indices) for number in column]
        return tuple(to_device(flat, torch.int64, self._table.device).view(3, -1))

    def _put(self, rows: torch.Tensor, columns: torch.Tensor, token_ids: torch.Tensor) -> None:
        self._table.index_put_((rows, columns), token_ids.int())

    def _row(self, request: RequestState, keep: list[RequestState]) -> _Row:
        row = self._rows.get(request.sequence_id)
        if row is None:
            if not self._free:
                self._reclaim({other.sequence_id for other in keep})
            row = self._rows[request.sequence_id] = _Row(self._free.pop())
        return row

    def _reclaim(self, live: set[int]) -> None:
        for sequence_id in [key for key in self._rows if key not in live]:
            self._free.append(self._rows.pop(sequence_id).index)
        if not self._free:
            size = self._table.shape[0]
            grow = max(4, size)
            self._table = torch.cat([self._table, self._table.new_zeros(grow, self._table.shape[1])])
            self._free = list(range(size, size + grow))
