"""By what rows of logits are drawn: seed, temperature and filters of each, as ops.sample takes them. Engine thread.

Steps of requests whose logits nobody edits, which CUDA graphs draw for, too, draw by tensors that stay where they are.
A step of the same requests as the one before finds there what it needs, and copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from slipstream_kernels import ops

from slipstream.worker.host_copy import Staging, pack
from slipstream.worker.request_state import DRAW_ROW, RequestState

_is_greedy, _draws_plainly = attrgetter("is_greedy"), attrgetter("draws_plainly")


class Draws(NamedTuple):
    """Arguments of ops.sample.  seeds: [num_rows] int64."""

    metadata: ops.SamplingMetadata
    seeds: torch.Tensor


def draws_of(requests: Sequence[RequestState], device: torch.device) -> Draws:
    """One row per request. Filters that no row uses are None, so that the kernel skips them. One copy to the device."""
    return _packed([request.draw for request in requests], device)


def draws_or_greedy(requests: Sequence[RequestState], device: torch.device) -> Draws | None:
    """The same, or None if the highest logit is drawn in every row."""
    return None if all(map(_is_greedy, requests)) else draws_of(requests, device)


def unedited_draws(requests: Sequence[RequestState], device: torch.device) -> Draws | None:
    """The same of the unchanged logits: what is drawn for requests that are edited is not taken, and costs least."""
    return None if all(map(_draws_plainly, requests)) else _packed([one.unedited_draw for one in requests], device)


class StaticDraws:
    """capacity: rows of the largest step that draws by them. Rows behind a step's requests are greedy, as all are at
    first."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        target = torch.zeros(capacity * DRAW_ROW.itemsize, dtype=torch.uint8, device=device)
        self._staging = Staging(target)
        self._host = np.zeros(len(target), dtype=np.uint8)
        self._columns: dict[str, np.ndarray] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        start = 0
        for name in _fields():
            dtype = DRAW_ROW[name]
            end = start + capacity * dtype.itemsize
            self._columns[name] = self._host[start:end].view(dtype)
            self._tensors[name] = target[start:end].view(getattr(torch, dtype.name))
            start = end
        self._loaded: Sequence[RequestState] = ()
        self._are_greedy = True
        self._views: dict[int, Draws] = {}  # by number of rows
        self.num_bytes = len(target)

    def first(self, count: int) -> Draws:
        """The first `count` rows."""
        draws = self._views.get(count)
        if draws is None:
            seeds, *others = (self._tensors[name][:count] for name in _fields())
            draws = self._views[count] = Draws(ops.SamplingMetadata(*others), seeds)
        return draws

    def load(self, requests: Sequence[RequestState]) -> None:
        """Bring those of a step's requests, before it draws. The same list has the same requests."""
        if requests is self._loaded:
            return
        self._loaded = requests
        are_greedy = all(map(_draws_plainly, requests))
        if are_greedy and self._are_greedy:
            return
        self._are_greedy = are_greedy
        rows = _rows_of(request.unedited_draw for request in requests)
        for name, column in self._columns.items():
            column[: len(rows)] = rows[name]
        self._columns["temperature"][len(rows) :] = 0.0
        self._staging.send(self._host)


def _packed(draws: list[bytes], device: torch.device) -> Draws:
    rows = _rows_of(draws)
    seeds, temperature, *filters = pack([rows[name].copy() for name in _used_fields(rows)], device)
    return Draws(ops.SamplingMetadata(temperature, *filters), seeds)


def _rows_of(draws: Iterable[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(draws), DRAW_ROW)


def _fields() -> tuple[str, ...]:
    """In the order of DRAW_ROW: seeds, and the fields of ops.SamplingMetadata."""
    assert DRAW_ROW.names is not None
    return DRAW_ROW.names


def _used_fields(rows: np.ndarray) -> tuple[str, ...]:
    """Either all filters or none: a kernel is compiled for each set of them."""
    is_filtered = (rows["top_k"] > 0) | (rows["top_p"] < 1.0) | (rows["min_p"] > 0.0)
    return _fields() if (is_filtered & (rows["temperature"] > 0.0)).any() else _fields()[:2]
