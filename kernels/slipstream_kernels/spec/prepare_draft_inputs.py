"""prepare_draft_inputs: contract and choice.  Inputs of the next level of a draft head."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream_kernels.select import require_shape, select

MAX_ROWS = 64  # of a request


class LevelPlaces(NamedTuple):
    """num_rows rows of each request, from the slot `first` behind its last row on; rows_per_level share a position."""

    first: int
    num_rows: int
    rows_per_level: int


class LevelRows(NamedTuple):
    """positions, slots: [num_requests * num_rows] int64, slot -1: writes nothing.  seq_lens: [num_requests] int32,
    these rows included; 0: the request computes nothing."""

    positions: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor


def prepare_draft_inputs(
    positions: torch.Tensor,
    last: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    places: LevelPlaces,
    *,
    block_size: int,
    num_positions: int,
    backend: str = "auto",
) -> LevelRows:
    """Positions and slots of these rows; a request's first slot is that of position start, defined below.

    positions: [T] int64, of the previous level.  last: [num_requests] int64, row indices.  seq_lens: [num_requests]
    int32, 0 for padding.  block_tables: [num_requests, width] int32, -1 pads.
    start = positions[last] + 1 + first.  Row i has the slot of position start + i, and the position start + i //
    rows_per_level, at most num_positions - 1.  Padding, and a request whose blocks end before its last row, computes
    nothing.
    """
    num_requests = last.shape[0]
    if not 0 < places.num_rows <= MAX_ROWS or places.rows_per_level < 1 or places.first < 0:
        raise ValueError(f"num_rows: {places.num_rows} from {places.first}, accepted: 1 to {MAX_ROWS}, from 0 on")
    require_shape("seq_lens", seq_lens, (num_requests,))
    for name, tensor, dtype in (("positions", positions, torch.int64), ("last", last, torch.int64)):
        if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, expected contiguous {dtype}")
    if block_tables.dim() != 2 or block_tables.shape[0] != num_requests or block_tables.stride(-1) != 1:
        raise ValueError(f"block_tables: shape {tuple(block_tables.shape)}, expected a row for {num_requests} requests")
    implementation = select("spec.prepare_draft_inputs", backend, positions)
    rows: LevelRows = implementation.prepare_draft_inputs(
        positions, last, seq_lens, block_tables, places, block_size, num_positions
    )
    return rows
