"""Products of sorted FP8 rows with their experts' 4-bit weights stored as records, in CUDA.  Hopper only.

No device value is read on the host, and grid and workspace depend on the numbers of rows and experts alone: CUDA-graph
safe.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream_kernels.cuda.build import load, missing
from slipstream_kernels.cuda.device import count_sms, is_hopper
from slipstream_kernels.cuda.launch import launch
from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe import expert_records
from slipstream_kernels.moe.cuda.int4_experts import BLOCK, MAX_EXPERTS, STRIP, ExpertParams, most_tiles
from slipstream_kernels.moe.tuning import H200, Tuning
from slipstream_kernels.routing import Routing

SOURCE = "sm90_record_experts.cu"
COLUMNS = (16, 32, 48, 64)  # rows of a tile that are compiled
TOTAL_BYTES = 32  # of a row and eight blocks: two fp16 each


class Variant(NamedTuple):
    """columns: rows of a tile.  warpgroups_m: 64 output features each, of a CTA at once; 1 and 2 of 16 columns."""

    columns: int
    warpgroups_m: int = 4


VARIANTS = (Variant(16, 1), Variant(16, 2), *(Variant(columns) for columns in COLUMNS))


def defines(columns: int, gated: bool) -> tuple[str, ...]:
    """The macros that choose a library."""
    return (f"SLIPSTREAM_COLUMNS={columns}", f"SLIPSTREAM_GATED={int(gated)}")


def variants() -> list[tuple[str, tuple[str, ...]]]:
    """(source, macros) of all libraries, for building ahead of time."""
    return [(SOURCE, defines(columns, gated)) for columns in COLUMNS for gated in (False, True)]


def refusal(weight: Int4Weight, num_experts: int) -> str | None:
    """Why this version cannot serve a canonical weight of so many experts; None if it can."""
    device = weight.packed.device
    if device.type != "cuda" or not is_hopper(device):
        return f"{device} is not a Hopper GPU (compute capability 9.0)"
    if num_experts > MAX_EXPERTS:
        return f"{num_experts} experts are more than {MAX_EXPERTS}"
    return expert_records.refusal(weight, num_experts) or missing(SOURCE, defines(COLUMNS[0], True))


def choose(sizes: tuple[int, int, int], out_features: int, num_sms: int, tuning: Tuning = H200) -> Variant:
    """A tile that holds all rows of most experts: the rows of an expert are known on the device alone.

    sizes: numbers of tokens, of rows and of experts.  out_features: of an expert.  Where that leaves CTAs few strips,
    their warpgroups share out the input features.
    """
    num_tokens, num_rows, num_experts = sizes
    likely = min(num_tokens, tuning.room * num_rows / num_experts)
    columns = next((columns for columns in COLUMNS if likely <= columns), COLUMNS[-1])
    strips = min(num_rows, num_experts) * out_features / STRIP / num_sms
    if columns > COLUMNS[0] or strips > tuning.many_strips:
        return Variant(max(columns, COLUMNS[1]))
    return Variant(columns, next((groups for groups in (1, 2) if strips <= tuning.narrow_strips * groups), 4))


def grouped_int4_mm(
    x: torch.Tensor | Fp8Rows,
    weight: Int4Weight,
    routing: Routing,
    by_token: bool,
    gated: bool,
    variant: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """See ops.grouped_int4_mm; weight is of expert_records.pack_experts.  The kernel quantises 16-bit rows itself.

    variant: None: chosen by the sizes.
    """
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"x: dtype {x.dtype} is not bfloat16 or float16, which records are multiplied by")
    rows, scales = (x.values, x.scales) if isinstance(x, Fp8Rows) else (x, None)
    device = rows.device
    if rows.stride(0) * rows.element_size() % 16 or rows.data_ptr() % 16:
        rows = rows.contiguous()
    out_features = weight.out_features // routing.num_experts
    width = out_features // 2 if gated else out_features
    out = torch.empty((routing.num_rows, width), dtype=x.dtype, device=device)
    if not routing.num_rows:
        return out
    columns, warpgroups_m = variant or choose(routing.sizes, out_features, count_sms(device))
    tiles, blocks = most_tiles(routing, columns), weight.in_features // BLOCK
    # of a tile: rows of its blocks, and totals of eight of those at a time
    row_bytes = blocks * BLOCK + -(-blocks // 8) * TOTAL_BYTES
    arranged = torch.empty(tiles * columns * row_bytes, dtype=torch.uint8, device=device)
    tile_scale = torch.empty(tiles * columns, dtype=torch.float32, device=device)
    params = ExpertParams(
        x=rows.data_ptr(),
        x_scale=None if scales is None else scales.data_ptr(),
        tokens=routing.tokens.data_ptr() if by_token else None,
        offsets=routing.offsets.data_ptr(),
        codes=weight.packed.data_ptr(),
        channel_scale=weight.scales.data_ptr(),
        out=out.data_ptr(),
        arranged=arranged.data_ptr(),
        tile_scale=tile_scale.data_ptr(),
        x_row_stride=rows.stride(0),
        num_experts=routing.num_experts,
        out_features=out_features,
        in_features=weight.in_features,
        most_tiles=tiles,
        out_is_half=x.dtype == torch.float16,
        num_ctas=count_sms(device),
        is_dependent=launches_dependently(device),
        warpgroups_m=warpgroups_m,
        num_rows=routing.num_rows,
        x_bytes=rows.element_size(),
    )
    launch("record_experts", load(SOURCE, defines(columns, gated)), params, device)
    return out
