"""By what rows of logits are drawn: seed, temperature and filters of each, as ops.sample takes them. Engine thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from slipstream_kernels import ops

from slipstream.worker.host_copy import pack
from slipstream.worker.request_state import DRAW_ROW, RequestState

_is_greedy = attrgetter("is_greedy")


class Draws(NamedTuple):
    """Arguments of ops.sample.  seeds: [num_rows] int64."""

    metadata: ops.SamplingMetadata
    seeds: torch.Tensor


def draws_of(requests: Sequence[RequestState], device: torch.device) -> Draws:
    """Of a row of each request. Filters that no row uses are None, so that the kernel skips them. One copy."""
    rows = _rows_of(requests)
    seeds, temperature, *filters = pack([rows[name].copy() for name in _used_fields(rows)], device)
    return Draws(ops.SamplingMetadata(temperature, *filters), seeds)


def draws_or_greedy(requests: Sequence[RequestState], device: torch.device) -> Draws | None:
    """The same, or None if the highest logit is drawn in every row."""
    return None if all(map(_is_greedy, requests)) else draws_of(requests, device)


def _rows_of(requests: Iterable[RequestState]) -> np.ndarray:
    return np.frombuffer(b"".join([request.draw for request in requests]), DRAW_ROW)


def _fields() -> tuple[str, ...]:
    """In the order of DRAW_ROW: seeds, and the fields of ops.SamplingMetadata."""
    assert DRAW_ROW.names is not None
    return DRAW_ROW.names


def _used_fields(rows: np.ndarray) -> tuple[str, ...]:
    """Either all filters or none: a kernel is compiled for each set of them."""
    is_filtered = (rows["top_k"] > 0) | (rows["top_p"] < 1.0) | (rows["min_p"] > 0.0)
    return _fields() if (is_filtered & (rows["temperature"] > 0.0)).any() else _fields()[:2]
