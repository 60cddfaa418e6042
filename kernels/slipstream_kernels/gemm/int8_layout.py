"""The order of int8 weights beside 16-bit rows in a Hopper GPU's memory: what repack_int8 makes there, and back.

Rows stay rows.  Every 16 columns have the order 0 8 1 9, 2 10 3 11, 4 12 5 13, 6 14 7 15: the four bytes that a lane
takes of a row for a product of 16 columns are a word, whose even and odd bytes are its two operands.  Words are kept as
int32, which tells repacked weights from plain ones.
"""

from __future__ import annotations

import torch

RUN = 16  # columns that are interleaved
BLOCK = 128  # columns of a block
TILE = 16  # rows of a tile


def refusal(out_features: int, in_features: int) -> str | None:
    """Why a weight of these sizes has no such order; None if it has."""
    if out_features % TILE:
        return f"out_features: {out_features} is not a multiple of {TILE}"
    return f"in_features: {in_features} is not a multiple of {BLOCK}" if in_features % BLOCK else None


def repack(values: torch.Tensor) -> torch.Tensor:
    """int8 [out_features, in_features] -> int32 [out_features, in_features / 4]."""
    runs = values.unflatten(1, (-1, 2, RUN // 4, 2))  # column / 8, pair, column % 2
    return runs.permute(0, 1, 3, 4, 2).reshape(values.shape).contiguous().view(torch.int32)


def unpack(qweight: torch.Tensor) -> torch.Tensor:
    """The inverse of repack."""
    values = qweight.view(torch.int8)
    runs = values.unflatten(1, (-1, RUN // 4, 2, 2))  # pair, column % 2, column / 8
    return runs.permute(0, 1, 4, 2, 3).reshape(values.shape).contiguous()
