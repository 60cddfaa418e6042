"""What the products on CUTLASS share on the host: the choice of a tile, whether libraries can be had, the launch.

A tile is a library of its own, a minute of compiling: all of a product's are built on first use with a line in the log,
or by `python -m slipstream_kernels.cuda.build`.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch

from slipstream_kernels.cuda import cutlass
from slipstream_kernels.cuda.build import is_built, missing
from slipstream_kernels.cuda.device import count_sms
from slipstream_kernels.cuda.launch import launch
from slipstream_kernels.dependent_launch import launches_dependently

OUTPUTS = {torch.bfloat16: "bfloat16_t", torch.float16: "half_t"}
COMMON = ("device", "num_sms", "is_dependent")  # the last fields of every kernel's arguments


class Tile(NamedTuple):
    """Tokens and output features of a tile, and how many tiles share what they read."""

    tokens: int
    rows: int
    cluster: int

    def defines(self, dtype: torch.dtype) -> tuple[str, ...]:
        """The macros of a library with results of `dtype`."""
        return (
            f"SLIPSTREAM_TILE_ROWS={self.rows}",
            f"SLIPSTREAM_TILE_TOKENS={self.tokens}",
            f"SLIPSTREAM_CLUSTER={self.cluster}",
            f"SLIPSTREAM_OUT={OUTPUTS[dtype]}",
        )


def choose_tile(tiles: tuple[Tile, Tile], num_tokens: int, out_features: int, num_sms: int, narrow_cost: float) -> Tile:
    """The tile whose waves of CTAs take the least time.

    tiles: wide, narrow.  narrow_cost: time of a narrow tile, of a wide one's (Tuning.narrow_tile_costs).
    """

    def num_waves(tile: Tile) -> int:
        num_tiles = -(-num_tokens // tile.tokens) * -(-out_features // tile.rows)
        return -(-num_tiles // num_sms)

    wide, narrow = tiles
    return narrow if narrow_cost * num_waves(narrow) < num_waves(wide) else wide


@lru_cache
def refusal(source: str, variants: tuple[tuple[str, ...], ...]) -> str | None:
    """Why libraries can be neither loaded from the cache nor built here; None if they can."""
    if all(is_built(source, defines, cutlass.FLAGS) for defines in variants):
        return None
    return missing(source, variants[0], cutlass.FLAGS) or cutlass.missing()


def launch_gemm(name: str, library: ctypes.CDLL, params: ctypes.Structure, device: torch.device) -> None:
    """Run slipstream_<name> on the device's current stream; fills the arguments' COMMON fields."""
    common = (device.index or 0, count_sms(device), launches_dependently(device))
    for field, value in zip(COMMON, common, strict=True):
        setattr(params, field, value)
    launch(name, library, params, device)
