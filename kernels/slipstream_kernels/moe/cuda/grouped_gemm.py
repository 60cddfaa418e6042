"""The host part of the grouped GEMMs with experts' 4-bit weights: workspaces, arguments, launch.  Hopper only.

A format (grouped_w4a16_gemm.py, grouped_w4a8_gemm.py) says what differs.  No device value is read on the host, and
grid and workspaces depend on the numbers of rows and experts alone: CUDA-graph safe.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from slipstream_kernels.cuda.build import load
from slipstream_kernels.cuda.device import count_sms, is_hopper
from slipstream_kernels.cuda.launch import addresses, fields, launch
from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe.tuning import Tuning
from slipstream_kernels.norm.gated_mul import silu_mul
from slipstream_kernels.routing import Routing

TILE, BLOCK = 16, 128  # output features of a tile, input features of a block: csrc/schedule/grouped_gemm_schedule.cuh
MAX_EXPERTS = 1024

POINTERS = (
    "x", "x_scale", "tokens", "offsets", "qweight", "group_scales", "channel_scale", "out", "permuted_x", "row_scale",
)  # fmt: skip
COUNTS = (
    "num_experts", "out_features", "in_features", "max_token_tiles", "is_channelwise", "out_is_half", "num_ctas",
    "is_dependent", "warpgroups_m", "num_rows", "x_bytes",
)  # fmt: skip


class GroupedGemmParams(ctypes.Structure):
    """csrc/params/grouped_gemm_params.h, field by field."""

    _fields_ = fields(POINTERS, ("x_row_stride",), COUNTS)


@dataclass(frozen=True)
class Kernel:
    """A compiled variant.  entry: slipstream_<entry> of the library that source and defines build.

    tile_rows: rows of a tile of tokens.  row_bytes: of a row of the permuted x, which a kernel before writes.
    group_scales: packed scales and zero points, if they lie apart; channel_scale: of output features.
    gates: it applies the gate; else that is a launch of its own.
    """

    entry: str
    source: str
    defines: tuple[str, ...]
    tile_rows: int
    row_bytes: int
    channel_scale: torch.Tensor | None = None
    group_scales: torch.Tensor | None = None
    warpgroups_m: int = 0
    gates: bool = True


class Tiled(Protocol):
    """A variant of a kernel.  tile_rows: of a tile of tokens."""

    @property
    def tile_rows(self) -> int: ...


T = TypeVar("T", bound=Tiled)


Rows = torch.Tensor | Fp8Rows
Variant = tuple[int, ...]
KernelOf = Callable[[Rows, Int4Weight, Routing, bool, Variant | None], Kernel]  # x, weight, routing, gated, variant


def refusal(weight: Int4Weight, num_experts: int) -> str | None:
    """Why no format can be multiplied on the weight's device with so many experts; None if one can."""
    device = weight.packed.device
    if device.type != "cuda" or not is_hopper(device):
        return f"{device} is not a Hopper GPU (compute capability 9.0)"
    return f"{num_experts} experts are more than {MAX_EXPERTS}" if num_experts > MAX_EXPERTS else None


def likely_rows(sizes: tuple[int, int, int], tuning: Tuning) -> float:
    """How many rows most experts have at most: how many each has is known on the device alone.

    sizes: numbers of tokens, of rows and of experts.
    """
    num_tokens, num_rows, num_experts = sizes
    return min(num_tokens, tuning.capacity_factor * num_rows / num_experts)


def tile_of_most(variants: Sequence[T], sizes: tuple[int, int, int], tuning: Tuning) -> T:
    """The smallest tile that holds the rows of most experts, else the largest.  sizes: as of likely_rows."""
    _, num_rows, num_experts = sizes
    rows = tuning.wide_capacity_factor * num_rows / num_experts
    return next((variant for variant in variants if variant.tile_rows >= rows), variants[-1])


def grouped_int4_mm(
    kernel_of: KernelOf,
    x: Rows,
    weight: Int4Weight,
    routing: Routing,
    by_token: bool,
    gated: bool,
    variant: Variant | None = None,
) -> torch.Tensor:
    """See ops.grouped_int4_mm; a format binds kernel_of.  variant: None: chosen by the sizes.

    Raises ValueError for a dtype that the kernels do not write.
    """
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"x: dtype {x.dtype} is not bfloat16 or float16, which a repacked weight is multiplied by")
    kernel = kernel_of(x, weight, routing, gated, variant)
    y = _multiply(x, weight, routing, kernel, by_token=by_token, gated=gated and kernel.gates)
    return silu_mul(y) if gated and not kernel.gates else y


def _multiply(
    x: Rows, weight: Int4Weight, routing: Routing, kernel: Kernel, *, by_token: bool, gated: bool
) -> torch.Tensor:
    """Two launches: the first permutes x by expert."""
    rows, scales = (x.values, x.scales) if isinstance(x, Fp8Rows) else (x, None)
    if rows.stride(0) * rows.element_size() % 16 or rows.data_ptr() % 16:
        rows = rows.contiguous()
    device, out_features = rows.device, weight.out_features // routing.num_experts
    out = torch.empty((routing.num_rows, out_features // 2 if gated else out_features), dtype=x.dtype, device=device)
    if not routing.num_rows:
        return out
    params, _workspaces = arguments(rows, weight, routing, kernel, out, x_scale=scales, by_token=by_token)
    params.num_ctas, params.is_dependent = count_sms(device), launches_dependently(device)
    launch(kernel.entry, load(kernel.source, kernel.defines), params, device)
    return out


def arguments(
    rows: torch.Tensor,
    weight: Int4Weight,
    routing: Routing,
    kernel: Kernel,
    out: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    by_token: bool,
) -> tuple[GroupedGemmParams, tuple[torch.Tensor, torch.Tensor]]:
    """(what the kernel is launched with, its way of launching aside; the workspaces that it names)"""
    tiles, group_scales = routing.max_tiles(kernel.tile_rows), kernel.group_scales
    permuted = torch.empty(tiles * kernel.tile_rows * kernel.row_bytes, dtype=torch.uint8, device=rows.device)
    row_scale = torch.empty(tiles * kernel.tile_rows, dtype=torch.float32, device=rows.device)
    tensors = {
        "x": rows,
        "x_scale": x_scale,
        "tokens": routing.tokens if by_token else None,
        "offsets": routing.offsets,
        "qweight": weight.packed,
        "group_scales": group_scales,
        "channel_scale": kernel.channel_scale,
        "out": out,
        "permuted_x": permuted,
        "row_scale": row_scale,
    }
    params = GroupedGemmParams(
        **addresses(tensors),
        x_row_stride=rows.stride(0),
        num_experts=routing.num_experts,
        out_features=weight.out_features // routing.num_experts,
        in_features=weight.in_features,
        max_token_tiles=tiles,
        is_channelwise=group_scales is not None and group_scales.numel() == weight.out_features,
        out_is_half=out.dtype == torch.float16,
        warpgroups_m=kernel.warpgroups_m,
        num_rows=routing.num_rows,
        x_bytes=rows.element_size(),
    )
    return params, (permuted, row_scale)
