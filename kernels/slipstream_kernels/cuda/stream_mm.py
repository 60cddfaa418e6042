"""The weight-streaming product in CUDA: chooses a variant, fills its arguments, launches it.  Hopper only.

No device value is read on the host and there is no workspace: CUDA-graph safe, on any stream.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache

import torch

from slipstream_kernels.cuda.build import load, missing
from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.fp8 import E4M3

LOG = logging.getLogger(__name__)
SOURCE = "stream_mm.cu"
OPERANDS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
MAX_TOKENS = 16
# Up to so many tokens it is faster than what else there is, in a chain of dependent launches on one H200 (docs/LOG.md).
MAX_CHOSEN_TOKENS = {torch.bfloat16: 16, torch.float16: 16, E4M3: 8}
SPAN_BYTES = 64  # of a weight row, what one warp multiplies at once
COLUMNS = (1, 2)  # of 8 tokens each, that are compiled
TILES = (2, 3, 4)  # 16-row tiles of one pass, that are compiled
# Of several passes: the more tiles, the fewer reads of the activations; narrow weights have theirs in more registers.
TILES_OF_PASSES = {torch.bfloat16: 4, torch.float16: 4, E4M3: 2}

POINTERS = ("x", "weight", "scale", "bias", "out")
STRIDES = ("x_row_stride", "out_row_stride", "scale_row_stride")
COUNTS = (
    "num_tokens", "num_units", "in_features", "num_ctas", "is_dependent", "prefetch_slots", "tiles", "columns",
    "is_gated",
)  # fmt: skip


class StreamParams(ctypes.Structure):
    """include/stream_params.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in STRIDES),
        *((name, ctypes.c_int32) for name in COUNTS),
    ]


def refusal(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None) -> str | None:
    """Why this version cannot multiply these; None if it can."""
    reason = _refusal(x.device, x.dtype, weight.dtype, x.shape[1])
    if reason is not None:
        return reason
    if x.shape[0] > MAX_TOKENS:
        return f"{x.shape[0]} tokens are more than {MAX_TOKENS}"
    if any(tensor.data_ptr() % 16 for tensor in (x, weight)) or x.stride(0) % 8:
        return "x or weight has rows that do not begin at multiples of 16 bytes"
    return missing(SOURCE, defines(x.dtype, weight.dtype, _by_blocks(scales)))


def max_tokens(weight: torch.Tensor, scales: torch.Tensor | None) -> int:
    """See ops.max_streamed_tokens."""
    return _max_tokens(weight.device, weight.dtype, weight.shape[1], _by_blocks(scales))


@lru_cache
def _max_tokens(device: torch.device, dtype: torch.dtype, in_features: int, by_blocks: bool) -> int:
    operand = torch.bfloat16 if dtype == E4M3 else dtype
    reason = _refusal(device, operand, dtype, in_features) or missing(SOURCE, defines(operand, dtype, by_blocks))
    if reason is not None:
        LOG.info("stream_mm does not serve weights of %s with %d columns: %s", dtype, in_features, reason)
    return MAX_CHOSEN_TOKENS[dtype] if reason is None else 0


def _refusal(device: torch.device, operand: torch.dtype, weight: torch.dtype, in_features: int) -> str | None:
    if device.type != "cuda":
        return f"x is on {device}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "the GPU is not a Hopper (compute capability 9.0)"
    if operand not in OPERANDS:
        return f"x is {operand}, not bfloat16 or float16"
    if in_features * weight.itemsize % SPAN_BYTES:
        return f"in_features {in_features} is not a multiple of {SPAN_BYTES // weight.itemsize}"
    return None


def stream_mm(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None, gated: bool
) -> torch.Tensor:
    """See ops.stream_mm.  One launch."""
    num_units = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((x.shape[0], num_units), dtype=x.dtype, device=x.device)
    if not x.shape[0]:
        return out
    library = load(SOURCE, defines(x.dtype, weight.dtype, _by_blocks(scales)))
    num_ctas = num_sms(x.device)
    params = StreamParams(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        scale=None if scales is None else scales.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        x_row_stride=x.stride(0),
        out_row_stride=out.stride(0),
        scale_row_stride=scales.stride(0) if scales is not None and _by_blocks(scales) else 0,
        num_tokens=x.shape[0],
        num_units=num_units,
        in_features=x.shape[1],
        num_ctas=num_ctas,
        is_dependent=launches_dependently(x.device),
        prefetch_slots=0,
        tiles=tiles_of(num_units, num_ctas, gated, weight.dtype),
        columns=next(count for count in COLUMNS if x.shape[0] <= 8 * count),
        is_gated=gated,
    )
    stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
    with torch.cuda.device(x.device):
        error = library.slipstream_stream_mm(ctypes.byref(params), stream)
    if error != 0:
        library.slipstream_error_text.restype = ctypes.c_char_p
        raise RuntimeError(f"stream_mm: CUDA error {error}: {library.slipstream_error_text(error).decode()}")
    return out


def tiles_of(num_units: int, num_ctas: int, gated: bool, weight: torch.dtype) -> int:
    """16-row tiles of a pass: as few as make one pass of a CTA's units; if too many, what several passes take."""
    units = -(-num_units // num_ctas)
    tiles = -(-units // (8 if gated else 16))
    return next((count for count in TILES if count >= tiles), TILES_OF_PASSES[weight])


def _by_blocks(scales: torch.Tensor | None) -> bool:
    return scales is not None and scales.dim() == 2


def defines(operand: torch.dtype, weight: torch.dtype, by_blocks: bool) -> tuple[str, ...]:
    """The macros that choose a library."""
    name = "PlainWeights"
    if weight == E4M3:
        name = "BlockFp8Weights" if by_blocks else "Fp8Weights"
    return (f"SLIPSTREAM_OPERAND={OPERANDS[operand]}", f"SLIPSTREAM_WEIGHTS={name}")


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    names = ("PlainWeights", "Fp8Weights", "BlockFp8Weights")
    return [
        (f"SLIPSTREAM_OPERAND={operand}", f"SLIPSTREAM_WEIGHTS={name}")
        for operand in OPERANDS.values()
        for name in names
    ]


@lru_cache
def num_sms(device: torch.device) -> int:
    """CTAs of a launch: one per SM."""
    return torch.cuda.get_device_properties(device).multi_processor_count
