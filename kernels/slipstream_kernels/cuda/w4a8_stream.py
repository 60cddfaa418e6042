"""Products of up to 64 FP8 rows with 4-bit weights in CUDA: chooses a split, fills arguments, launches.  Hopper only.

No device value is read on the host and there is no workspace: CUDA-graph safe, on any stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from slipstream_kernels.cuda.build import load
from slipstream_kernels.cuda.launch import check, fields, launch
from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.integer import Int4Weight

SOURCE = "w4a8_stream.cu"
COLUMNS = (16, 32, 64)  # numbers of tokens that are compiled; others are rounded up
MAX_TOKENS = COLUMNS[-1]
SPLITS = tuple(range(1, 9))  # CTAs of a cluster, which share the input features
STRIP, BLOCK = 16, 128  # output features of a strip, input features of a block
PASS_STRIPS, WARPGROUP_STRIPS = 16, 4

# Clocks of an SM, for the choice of a split (docs/LOG.md).
PRODUCTS_CLOCKS = 256  # that a warpgroup takes for a block, of which they share what all need
BLOCK_CLOCKS = 600  # that one warpgroup alone takes for a block
BYTES_PER_CLOCK = 23  # that an SM takes in
EXCHANGE_CLOCKS = 2500  # of a cluster's sums

POINTERS = ("x", "token_scale", "codes", "words", "channel_scale", "bias", "out")
COUNTS = (
    "num_tokens", "out_features", "in_features", "columns", "groups_per_block", "is_channelwise", "out_is_half",
    "splits", "num_clusters", "is_dependent",
)  # fmt: skip


class W4a8StreamParams(ctypes.Structure):
    """include/w4a8_stream_params.h, field by field."""

    _fields_ = fields(POINTERS, ("x_row_stride",), COUNTS)


class Split(NamedTuple):
    """CTAs of a cluster, and how many clusters share the output features."""

    ctas: int
    num_clusters: int


def w4a8_stream(
    rows: Fp8Rows, weight: Int4Weight, bias: torch.Tensor | None, out: torch.Tensor, *, split: Split | None = None
) -> None:
    """out = dequantised(rows) @ dequantised(weight).T + bias, of at most MAX_TOKENS rows.  One launch.

    rows: scaled per token, at multiples of 16 bytes.  weight: repacked.  out: [num_tokens, out_features], contiguous,
    bf16 or fp16; bias too.  split: else chosen by the sizes.
    """
    assert weight.zeros is not None
    if not rows.num_tokens:
        return
    device, words = out.device, weight.scales[0]
    columns = next(count for count in COLUMNS if count >= rows.num_tokens)
    at_once = partial(clusters_at_once, device, columns, words.shape[2])
    split = split or choose_split(columns, weight.out_features, weight.in_features, at_once)
    params = W4a8StreamParams(
        x=rows.values.data_ptr(),
        token_scale=rows.scales.data_ptr(),
        codes=weight.packed.data_ptr(),
        words=words.data_ptr(),
        channel_scale=weight.zeros.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        x_row_stride=rows.values.stride(0),
        num_tokens=rows.num_tokens,
        out_features=weight.out_features,
        in_features=weight.in_features,
        columns=columns,
        groups_per_block=words.shape[2],
        is_channelwise=words.shape[0] == 1,
        out_is_half=out.dtype == torch.float16,
        splits=split.ctas,
        num_clusters=split.num_clusters,
        is_dependent=launches_dependently(device),
    )
    launch("w4a8_stream", load(SOURCE, ()), params, device)


def choose_split(columns: int, out_features: int, in_features: int, at_once: Callable[[int], int]) -> Split:
    """The split that takes the least time by counting products and bytes.  at_once: clusters of so many CTAs."""
    strips, blocks = out_features // STRIP, in_features // BLOCK

    def clocks(ctas: int) -> float:
        of_cluster = -(-strips // min(at_once(ctas), strips))
        passes = -(-of_cluster // PASS_STRIPS)
        if ctas > 1 and (passes > 1 or ctas > blocks):  # sums are exchanged where the ring was
            return float("inf")
        rounds, in_pass = passes * -(-blocks // ctas), -(-of_cluster // passes)
        products = rounds * max(-(-in_pass // WARPGROUP_STRIPS) * PRODUCTS_CLOCKS, BLOCK_CLOCKS)
        taken_in = rounds * BLOCK * (in_pass * STRIP // 2 + columns) / BYTES_PER_CLOCK
        return max(products, taken_in) + (EXCHANGE_CLOCKS if ctas > 1 else 0)

    ctas = min((count for count in SPLITS if at_once(count)), key=clocks)
    return Split(ctas, min(at_once(ctas), strips))


@lru_cache
def clusters_at_once(device: torch.device, columns: int, groups_per_block: int, ctas: int) -> int:
    """How many clusters of so many CTAs the device runs at once; 0 if it cannot."""
    library, count = load(SOURCE, ()), ctypes.c_int()
    params = W4a8StreamParams(columns=columns, groups_per_block=groups_per_block, splits=ctas, num_clusters=1)
    with torch.cuda.device(device):
        error = library.slipstream_w4a8_stream_clusters(ctypes.byref(params), ctypes.byref(count))
    check("w4a8_stream", library, error)
    return count.value
