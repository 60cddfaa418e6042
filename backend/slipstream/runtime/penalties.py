"""What penalised requests have said so far, as a device table kept between steps: a step adds its new tokens only.

Engine thread. A request that comes back after its row was reclaimed is copied anew from its token ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.core.request import Request


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

    def update(self, requests: list[Request]) -> torch.Tensor:
        """[len(requests), longest] int32: prompt and output of each request; what follows them is of no meaning."""
        rows = [self._row(request, requests) for request in requests]
        places: list[tuple[int, int, int]] = []
        for request, row in zip(requests, rows):
            start = row.num_tokens
            places += [(row.index, start + i, token_id) for i, token_id in enumerate(request.token_ids[start:])]
            row.num_tokens = request.num_tokens
        device = self._table.device
        if places:
            columns = torch.tensor(places).T.contiguous().to(device, non_blocking=True)
            self._table.index_put_((columns[0], columns[1]), columns[2].int())
        order = torch.tensor([row.index for row in rows]).to(device, non_blocking=True)
        return self._table[order, : max(row.num_tokens for row in rows)]

    def _row(self, request: Request, keep: list[Request]) -> _Row:
        row = self._rows.get(request.request_id)
        if row is None:
            if not self._free:
                self._reclaim({other.request_id for other in keep})
            row = self._rows[request.request_id] = _Row(self._free.pop())
        return row

    def _reclaim(self, live: set[int]) -> None:
        for request_id in [key for key in self._rows if key not in live]:
            self._free.append(self._rows.pop(request_id).index)
        if not self._free:
            size = self._table.shape[0]
            grow = max(4, size)
            self._table = torch.cat([self._table, self._table.new_zeros(grow, self._table.shape[1])])
            self._free = list(range(size, size + grow))
