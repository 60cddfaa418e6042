"""Products of sorted rows with their experts' 4-bit weights in CUDA: fills the kernel's arguments.  Hopper only.

No device value is read on the host, and grid and workspace depend on the numbers of rows and experts alone: CUDA-graph
safe.
"""

from __future__ import annotations

import ctypes
import itertools

import torch

from slipstream_kernels.cuda.build import load, missing
from slipstream_kernels.cuda.device import count_sms, is_hopper
from slipstream_kernels.cuda.launch import fields, launch
from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.cuda.int4_rows import INPUTS
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe.tuning import H200, Tuning
from slipstream_kernels.routing import Routing

SOURCE = "sm90_int4_experts.cu"
COLUMNS = (2, 6)  # of 8 rows, of the tiles that the kernel is compiled for
STRIP, BLOCK = 16, 128  # csrc/schedule/expert_walk.cuh
MAX_EXPERTS = 1024

POINTERS = (
    "x", "x_scale", "tokens", "offsets", "codes", "words", "channel_scale", "out", "arranged", "tile_scale",
)  # fmt: skip
COUNTS = (
    "num_experts", "out_features", "in_features", "most_tiles", "is_channelwise", "out_is_half", "num_ctas",
    "is_dependent", "warpgroups_m", "num_rows", "x_bytes",
)  # fmt: skip


class ExpertParams(ctypes.Structure):
    """csrc/params/expert_params.h, field by field."""

    _fields_ = fields(POINTERS, ("x_row_stride",), COUNTS)


def defines(dtype: torch.dtype, columns: int, groups_per_block: int, gated: bool) -> tuple[str, ...]:
    """The macros that choose the library for rows of `dtype`; groups: 1 (of 128, or whole rows) or 2 (of 64)."""
    return (
        f"SLIPSTREAM_COLUMNS={columns}",
        f"SLIPSTREAM_INPUT={INPUTS[dtype]}",
        f"SLIPSTREAM_GROUPS={groups_per_block}",
        f"SLIPSTREAM_GATED={int(gated)}",
    )


def variants() -> list[tuple[str, tuple[str, ...]]]:
    """(source, macros) of all libraries, for building ahead of time."""
    return [(SOURCE, defines(*variant)) for variant in itertools.product(INPUTS, COLUMNS, (1, 2), (False, True))]


def refusal(weight: Int4Weight, num_experts: int) -> str | None:
    """Why this version cannot serve a canonical weight of so many experts; None if it can."""
    device = weight.packed.device
    if device.type != "cuda" or not is_hopper(device):
        return f"{device} is not a Hopper GPU (compute capability 9.0)"
    out_features = weight.out_features // num_experts
    if out_features % (2 * STRIP):
        return f"out_features: {out_features} of an expert are not a multiple of {2 * STRIP}"
    if num_experts > MAX_EXPERTS:
        return f"{num_experts} experts are more than {MAX_EXPERTS}"
    sizes = int4_layout.refusal(out_features, weight.in_features, weight.group_size)
    return sizes or missing(SOURCE, defines(torch.bfloat16, COLUMNS[0], groups_per_block(weight), True))


def groups_per_block(weight: Int4Weight) -> int:
    return 2 if weight.group_size == BLOCK // 2 else 1


def tile_columns(sizes: tuple[int, int, int], tuning: Tuning = H200) -> int:
    """Of a tile that holds all rows of most experts: the rows of an expert are known on the device alone.

    sizes: numbers of tokens, of rows and of experts.
    """
    num_tokens, num_rows, num_experts = sizes
    likely = min(num_tokens, tuning.room * num_rows / num_experts)
    return next((columns for columns in COLUMNS if likely <= 8 * columns), COLUMNS[-1])


def most_tiles(routing: Routing, tile_rows: int) -> int:
    """Tiles of one expert's rows, if they are dealt out in the worst way."""
    begun = min(routing.num_rows, routing.num_experts)
    return begun + (routing.num_rows - begun) // tile_rows


def grouped_int4_mm(
    x: torch.Tensor | Fp8Rows,
    weight: Int4Weight,
    routing: Routing,
    by_token: bool,
    gated: bool,
    variant: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """See ops.grouped_int4_mm; weight is repacked.  variant: columns of a tile; None: chosen by the sizes."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"x: dtype {x.dtype} is not bfloat16 or float16, which a repacked weight is multiplied by")
    rows, scales = (x.values, x.scales) if isinstance(x, Fp8Rows) else (x, None)
    if rows.stride(0) * rows.element_size() % 16 or rows.data_ptr() % 16:
        rows = rows.contiguous()
    device, out_features = rows.device, weight.out_features // routing.num_experts
    width = out_features // 2 if gated else out_features
    out = torch.empty((routing.num_rows, width), dtype=x.dtype, device=device)
    if not routing.num_rows:
        return out
    columns = tile_columns(routing.sizes) if variant is None else variant[0]
    tiles = most_tiles(routing, 8 * columns)
    pairs, tile_rows = -(-weight.in_features // (2 * BLOCK)), 8 * columns
    # of a row and pair of blocks: its features in 16 bits, and two sums for each group
    row_bytes = 2 * (2 * BLOCK + 8 * groups_per_block(weight))
    arranged = torch.empty(tiles * tile_rows * pairs * row_bytes, dtype=torch.uint8, device=device)
    tile_scale = torch.empty(tiles * tile_rows, dtype=torch.float32, device=device)
    assert weight.zeros is not None
    params = ExpertParams(
        x=rows.data_ptr(),
        x_scale=None if scales is None else scales.data_ptr(),
        tokens=routing.tokens.data_ptr() if by_token else None,
        offsets=routing.offsets.data_ptr(),
        codes=weight.packed.data_ptr(),
        words=weight.scales.data_ptr(),
        channel_scale=weight.zeros.data_ptr(),
        out=out.data_ptr(),
        arranged=arranged.data_ptr(),
        tile_scale=tile_scale.data_ptr(),
        x_row_stride=rows.stride(0),
        num_experts=routing.num_experts,
        out_features=out_features,
        in_features=weight.in_features,
        most_tiles=tiles,
        is_channelwise=weight.scales.numel() == weight.out_features,
        out_is_half=x.dtype == torch.float16,
        num_ctas=count_sms(device),
        is_dependent=launches_dependently(device),
    )
    library = load(SOURCE, defines(rows.dtype, columns, groups_per_block(weight), gated))
    launch("int4_experts", library, params, device)
    return out
