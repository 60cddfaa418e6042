"""Token history of penalised requests: a device table kept between steps, to which a step adds its new tokens.

Engine thread. If the row of a request was reclaimed meanwhile, its tokens are copied again. The memory plan counts what
it takes (history_bytes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from slipstream.worker.host_copy import to_device
from slipstream.worker.input_batch import SampledTokens
from slipstream.worker.request_state import RequestState

COPY_BYTES = 64 << 20  # of the table's rows that are copied for one launch, unless a single row has more
_FEW = 16  # up to this many new tokens of a request are written in one operation with those of others
_COPIES = 2  # that live at once: with drafts, a copy and a wider one
Paths = Sequence[tuple[int, ...]]  # per row: the drafts that lead to it


@dataclass(slots=True)
class _Row:
    index: int
    num_tokens: int = 0  # of request.token_ids, copied so far


def history_bytes(max_num_seqs: int, max_model_len: int, num_rows: int) -> int:
    """Device memory of the table and of the copies that live at once. num_rows: of logits in the largest step."""
    row = max_model_len * torch.int32.itemsize
    return max_num_seqs * row + min(_COPIES * num_rows * row, max(COPY_BYTES, _COPIES * row))


class TokenHistory:
    """A row of 4 bytes x max_model_len for each of max_num_seqs requests, allocated when the first one is penalised."""

    def __init__(self, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        self._shape = max_num_seqs, max_model_len
        self._table = torch.zeros(0, max_model_len, dtype=torch.int32, device=device)
        self._rows: dict[int, _Row] = {}
        self._free = list(range(max_num_seqs))

    def read(
        self, requests: list[RequestState], sampled: SampledTokens | None = None, paths: Paths | None = None
    ) -> Iterator[tuple[slice, torch.Tensor, list[int]]]:
        """Yields for some rows at a time: which of `requests`, [rows, longest] int32, prompt and output of each, and
        their lengths; entries past a length are undefined. sampled: as `update`.

        paths: per row (a request may have several), the drafts after its request's tokens.
        """
        rows, num_tokens = self.update(requests, sampled)
        paths = paths or [()] * len(rows)
        lengths = [count + len(path) for count, path in zip(num_tokens, paths)]
        most = max(1, COPY_BYTES // (_COPIES * torch.int32.itemsize * max(lengths)))
        for start in range(0, len(rows), most):
            piece = slice(start, start + most)
            history = self._table[rows[piece], : max(num_tokens[piece])]
            drafts = [
                (row, count + i, token_id)
                for row, (count, path) in enumerate(zip(num_tokens[piece], paths[piece]))
                for i, token_id in enumerate(path)
            ]
            if drafts:
                history = torch.nn.functional.pad(history, (0, max(lengths[piece]) - history.shape[1]))
                row_of, column_of, token_ids = self._columns(drafts)
                history.index_put_((row_of, column_of), token_ids.int())
            yield piece, history, lengths[piece]

    def update(
        self, requests: list[RequestState], sampled: SampledTokens | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Add what is new. Returns the requests' rows of the table, int64, and how many tokens each has. sampled: the
        step before, for tokens that the host does not know yet."""
        if not len(self._table):
            self._table = self._table.new_zeros(self._shape)
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
        return to_device([row.index for row in rows], torch.int64, self._table.device), [row.num_tokens for row in rows]

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
