"""The skinny GEMM in CUDA: chooses a variant, fills its arguments, launches it.  Hopper only.

No device value is read on the host: CUDA-graph safe.  Launches on one device must follow each other (one stream).
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch

from slipstream_kernels.cuda.build import build_refusal, load
from slipstream_kernels.cuda.device import count_sms, hopper_refusal
from slipstream_kernels.cuda.launch import fields, launch
from slipstream_kernels.dependent_launch import copy_pace, launches_dependently
from slipstream_kernels.fp8 import E4M3

SOURCE = "sm90_skinny_gemm.cu"
OPERANDS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
MAX_TOKENS = 16
# Formats of weights that become operands in registers.  int32: of repack_int8.
EXPANDED = {E4M3: "Fp8Weights", torch.int8: "Int8Weights", torch.int32: "InterleavedInt8Weights"}
SPAN_BYTES = 64  # of a weight row, what one warp multiplies at once
MAX_RESIDENT_TOKENS, MAX_RESIDENT_FEATURES = 8, 4096  # activations that fit in the registers of a CTA
RELOADED_TILES, RESIDENT_TILES = (2, 3, 4), (2, 3)  # 16-row tiles of one pass, that are compiled
TILES_OF_PASSES = 2  # of several passes
MIN_QUEUED_PASSES = 6  # of a CTA: fewer are too coarse to even out uneven memory

POINTERS = ("x", "weight", "scale", "bias", "out", "queue")
STRIDES = ("x_row_stride", "out_row_stride", "scale_row_stride")
COUNTS = (
    "num_tokens", "num_outputs", "in_features", "num_ctas", "is_dependent", "tiles", "columns", "is_gated",
    "is_resident", "copy_pace",
)  # fmt: skip


class Variant(NamedTuple):
    """tiles: of 16 rows, in a pass.  columns: of 8 tokens.  is_resident: activations stay in registers.

    is_queued: CTAs draw passes from a queue."""

    tiles: int
    columns: int
    is_resident: bool
    is_queued: bool


class SkinnyGemmParams(ctypes.Structure):
    """csrc/params/skinny_gemm_params.h, field by field."""

    _fields_ = fields(POINTERS, STRIDES, COUNTS)


def refusal(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None) -> str | None:
    """Why this version cannot multiply these; None if it can."""
    row_bytes = weight.shape[1] * weight.itemsize
    reason = product_refusal(x.device, x.dtype, weight.dtype, row_bytes, _by_blocks(scales), x.shape[0])
    if reason is None and (any(tensor.data_ptr() % 16 for tensor in (x, weight)) or x.stride(0) % 8):
        return "x or weight has rows that do not begin at multiples of 16 bytes"
    return reason


def product_refusal(
    device: torch.device, operand: torch.dtype, weight: torch.dtype, row_bytes: int, by_blocks: bool, num_tokens: int
) -> str | None:
    """The same of so many rows of type `operand`, at multiples of 16 bytes, beside weight rows of so many bytes."""
    reason = _refusal(device, operand, row_bytes)
    if reason is None and num_tokens > MAX_TOKENS:
        return f"{num_tokens} tokens are more than {MAX_TOKENS}"
    return reason or build_refusal(SOURCE, defines(operand, weight, by_blocks))


def _refusal(device: torch.device, operand: torch.dtype, row_bytes: int) -> str | None:
    if (reason := hopper_refusal(device, "x is")) is not None:
        return reason
    if operand not in OPERANDS:
        return f"x is {operand}, not bfloat16 or float16"
    if row_bytes % SPAN_BYTES:
        return f"the weight's rows of {row_bytes} bytes are not a multiple of {SPAN_BYTES}"
    return None


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    gated: bool,
    variant: Variant | None = None,
) -> torch.Tensor:
    """See ops.skinny_gemm.  One launch.  variant: None: chosen by the sizes."""
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((x.shape[0], num_outputs), dtype=x.dtype, device=x.device)
    if not x.shape[0]:
        return out
    library = load(SOURCE, defines(x.dtype, weight.dtype, _by_blocks(scales)))
    num_ctas = count_sms(x.device)  # one per SM
    variant = variant or choose(x.shape[0], num_outputs, x.shape[1], gated, num_ctas)
    params = SkinnyGemmParams(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        scale=None if scales is None else scales.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        queue=queue(x.device).data_ptr() if variant.is_queued else None,
        x_row_stride=x.stride(0),
        out_row_stride=out.stride(0),
        scale_row_stride=scales.stride(0) if scales is not None and _by_blocks(scales) else 0,
        num_tokens=x.shape[0],
        num_outputs=num_outputs,
        in_features=x.shape[1],
        num_ctas=num_ctas,
        is_dependent=launches_dependently(x.device),
        tiles=variant.tiles,
        columns=variant.columns,
        is_gated=gated,
        is_resident=variant.is_resident,
        copy_pace=copy_pace(x.device),
    )
    launch("skinny_gemm", library, params, x.device)
    return out


def choose(num_tokens: int, num_outputs: int, in_features: int, gated: bool, num_ctas: int) -> Variant:
    """One pass with the fewest tiles that a CTA's outputs need; if too many, small passes, of a queue if many."""
    columns = -(-num_tokens // 8)
    is_resident = num_tokens <= MAX_RESIDENT_TOKENS and in_features <= MAX_RESIDENT_FEATURES
    compiled = RESIDENT_TILES if is_resident else RELOADED_TILES
    outputs_per_tile = 8 if gated else 16
    needed = -(-num_outputs // (num_ctas * outputs_per_tile))
    if needed <= compiled[-1]:
        return Variant(max(needed, compiled[0]), columns, is_resident, is_queued=False)
    return Variant(TILES_OF_PASSES, columns, is_resident, is_queued=needed >= TILES_OF_PASSES * MIN_QUEUED_PASSES)


def _by_blocks(scales: torch.Tensor | None) -> bool:
    return scales is not None and scales.dim() == 2


def defines(operand: torch.dtype, weight: torch.dtype, by_blocks: bool) -> tuple[str, ...]:
    """The macros that choose a library."""
    name = "BlockFp8Weights" if by_blocks and weight == E4M3 else EXPANDED.get(weight, "PlainWeights")
    return (f"SLIPSTREAM_OPERAND={OPERANDS[operand]}", f"SLIPSTREAM_WEIGHTS={name}")


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    names = ("PlainWeights", "BlockFp8Weights", *EXPANDED.values())
    return [
        (f"SLIPSTREAM_OPERAND={operand}", f"SLIPSTREAM_WEIGHTS={name}")
        for operand in OPERANDS.values()
        for name in names
    ]


@lru_cache
def queue(device: torch.device) -> torch.Tensor:
    """What CTAs draw passes from: zeros between launches, which follow each other on one stream.  Made on first use."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("skinny_gemm: first use on this device lies inside a graph capture; run it once before")
    return torch.zeros(2, dtype=torch.int32, device=device)
