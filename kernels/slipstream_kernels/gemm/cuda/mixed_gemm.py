"""Products of 9 to 256 16-bit rows with int8 weights in CUDA: choice of a variant, arguments, launch.  Hopper only.

No device value is read on the host and there is no workspace: CUDA-graph safe, on any stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import product
from typing import NamedTuple, Protocol

import torch

from slipstream_kernels.cuda.build import load
from slipstream_kernels.cuda.launch import addresses, fields, launch
from slipstream_kernels.dependent_launch import copy_pace, launches_dependently
from slipstream_kernels.gemm.tuning import H200, Tuning

SOURCE = "sm90_mixed_gemm.cu"
COLUMNS = (16, 32, 48, 64, 96, 128)  # numbers of tokens of a tile that are compiled; others are rounded up
WARPGROUPS_M = (1, 2, 4)
SPLITS = tuple(range(1, 9))  # CTAs of a cluster, which split the input features
TILE, BLOCK = 16, 128
OPERANDS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
POINTERS = (
    "x", "qweight", "group_scales", "channel_scale", "token_scale", "activation_sums", "bias", "permuted_x",
    "out",
)  # fmt: skip
COUNTS = (
    "num_tokens", "out_features", "in_features", "warpgroups_m", "splits", "num_clusters", "token_tiles", "is_gated",
    "is_channelwise", "out_is_half", "is_dependent", "copy_pace",
)  # fmt: skip


class MixedGemmParams(ctypes.Structure):
    """csrc/params/mixed_gemm_params.h, field by field."""

    _fields_ = fields(POINTERS, ("x_row_stride",), COUNTS)


class Variant(NamedTuple):
    """columns: tokens of a tile.  warpgroups_m: 64 output features each, that a CTA has at once.

    splits: CTAs of a cluster, which split the summed dimension.  token_tiles: tiles of tokens, each of other clusters.
    """

    columns: int
    warpgroups_m: int
    splits: int
    token_tiles: int = 1


class Format(NamedTuple):
    """A format of csrc/formats/mixed_gemm_formats.cuh.  groups: of 128 input features; 0: the format has none.

    sums_columns: tiles of up to so many tokens take the format's other form, which scales sums instead of operands.
    """

    name: str
    operand: str
    groups: int = 0
    sums_columns: int = 0

    def defines(self, columns: int) -> tuple[str, ...]:
        """The macros that choose a library."""
        return (
            f"SLIPSTREAM_FORMAT={self.name}{'Sums' if columns <= self.sums_columns else ''}",
            f"SLIPSTREAM_OPERAND={self.operand}",
            f"SLIPSTREAM_GROUPS={self.groups}",
            f"SLIPSTREAM_COLUMNS={columns}",
        )


def format_of(dtype: torch.dtype, groups: int = 0) -> Format:
    """The format of rows of `dtype`.  Scales are of whole rows: groups says nothing."""
    return Format("W8A16", OPERANDS[dtype])


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [format_of(dtype).defines(columns) for dtype in OPERANDS for columns in COLUMNS]


def mixed_gemm(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    variant: Variant | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ (values * scales).T + bias, or silu(gate) * up of it; qweight: of int8_layout.repack.

    x: bf16 or fp16, rows at multiples of 16 bytes.  gated: out_features is a multiple of 32.  variant: None: chosen.
    One launch.
    """
    out_features, in_features = qweight.shape[0], x.shape[1]
    if out is None:
        out = torch.empty((x.shape[0], out_features // 2 if gated else out_features), dtype=x.dtype, device=x.device)
    weight_format = format_of(x.dtype)
    at_once = partial(clusters_at_once, x.device, weight_format)
    variant = variant or choose(x.shape[0], (out_features, in_features), at_once)
    params = MixedGemmParams(
        **addresses({"x": x, "qweight": qweight, "channel_scale": scales, "bias": bias, "out": out}),
        x_row_stride=x.stride(0) * x.element_size(),
        num_tokens=x.shape[0],
        out_features=out_features,
        in_features=in_features,
        warpgroups_m=variant.warpgroups_m,
        splits=variant.splits,
        num_clusters=clusters_along_m(out_features, variant, at_once(variant)) * variant.token_tiles,
        token_tiles=variant.token_tiles,
        is_gated=gated,
        is_dependent=launches_dependently(x.device),
        copy_pace=copy_pace(x.device),
    )
    launch("mixed_gemm", load(SOURCE, weight_format.defines(variant.columns)), params, x.device)
    return out


def choose(
    num_tokens: int, sizes: tuple[int, int], count_clusters: Callable[[Variant], int], tuning: Tuning = H200
) -> Variant:
    """The first of the ordered variants whose CTAs have all their output features at once; else several passes.

    sizes: output and input features.  count_clusters: how many of a variant's clusters run at once; 0: it cannot run.
    """
    columns, token_tiles = tiles_of(num_tokens)
    for warpgroups_m, splits in next(ordered for most, ordered in tuning.mixed_gemm.items() if columns <= most):
        variant = Variant(columns, warpgroups_m, splits, token_tiles)
        if fits(sizes, variant, count_clusters(variant)):
            return variant
    return Variant(columns, WARPGROUPS_M[-1], 1, token_tiles)


def candidates(num_tokens: int, sizes: tuple[int, int], count_clusters: Callable[[Variant], int]) -> Iterator[Variant]:
    """The variants that can run; arguments as of choose."""
    return candidates_of(tiles_of(num_tokens), sizes, count_clusters)


def candidates_of(
    tiles: tuple[int, int], sizes: tuple[int, int], count_clusters: Callable[[Variant], int]
) -> Iterator[Variant]:
    """Those of such tiles; tiles: of tiles_of."""
    columns, token_tiles = tiles
    for warpgroups_m, splits in product(WARPGROUPS_M, SPLITS):
        variant = Variant(columns, warpgroups_m, splits, token_tiles)
        at_once = count_clusters(variant)
        is_in_passes = warpgroups_m == WARPGROUPS_M[-1] and splits == 1
        if fits(sizes, variant, at_once) or (is_in_passes and clusters_along_m(sizes[0], variant, at_once)):
            yield variant


def tiles_of(num_tokens: int, most_columns: int = COLUMNS[-1]) -> tuple[int, int]:
    """(tokens of a tile, number of tiles), of tiles of up to so many tokens."""
    token_tiles = -(-num_tokens // most_columns)
    return next(count for count in COLUMNS if count * token_tiles >= num_tokens), token_tiles


def fits(sizes: tuple[int, int], variant: Variant, at_once: int) -> bool:
    """Whether the variant runs here, and its CTAs have all their output features at once."""
    clusters = clusters_along_m(sizes[0], variant, at_once)
    if not clusters or variant.splits > sizes[1] // BLOCK:
        return False
    return -(-sizes[0] // TILE // clusters) <= 4 * variant.warpgroups_m


def clusters_along_m(out_features: int, variant: Tiled, at_once: int) -> int:
    """Clusters that divide the output features; 0: the device cannot run the variant."""
    return min(at_once // variant.token_tiles, out_features // TILE)


class Tiled(Protocol):
    """Variants of several tiles of tokens."""

    @property
    def token_tiles(self) -> int: ...


class Sizes(Protocol):
    """What the variants of all formats have."""

    @property
    def columns(self) -> int: ...
    @property
    def warpgroups_m(self) -> int: ...
    @property
    def splits(self) -> int: ...


@lru_cache(maxsize=4096)
def clusters_at_once(device: torch.device, weight_format: Format, variant: Sizes) -> int:
    """How many clusters of a format's variant the device runs at once; 0 if it cannot."""
    library = load(SOURCE, weight_format.defines(variant.columns))
    count = ctypes.c_int()
    params = MixedGemmParams(warpgroups_m=variant.warpgroups_m, splits=variant.splits, num_clusters=1)
    with torch.cuda.device(device):
        error = library.slipstream_mixed_gemm_clusters(ctypes.byref(params), ctypes.byref(count))
    return 0 if error else count.value
