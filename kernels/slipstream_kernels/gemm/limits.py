"""What GPUs must have for a format, and what its products take beside the weights: asked before any weight is read."""

from __future__ import annotations

import torch

from slipstream_kernels.gemm.cuda import stream_plan, stream_w4a8_choice, stream_w4a16_choice, swap_ab_stream_choice
from slipstream_kernels.gemm.tuning import LIMITED_WRITE_OUTS, MOST_WRITTEN_OUT_BYTES, WRITTEN_OUT_BYTES


def fp8_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why FP8 products cannot run: a GPU needs tensor cores that take e4m3, and gives bf16; a CPU takes any."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"FP8 products need compute capability 8.9, this GPU has {major}.{minor}"
    return None if dtype == torch.bfloat16 else f"FP8 products give bfloat16 on a GPU, not {dtype}"


def fp8_sums_bytes(num_sms: int) -> int:
    """The most that partial sums of an FP8 product take, with one scale a weight row and the kernels in CUDA."""
    return stream_plan.sums_bytes(swap_ab_stream_choice.MAX_TOKENS, num_sms)


def w4a16_sums_bytes(num_sms: int) -> int:
    """The same of a product of 16-bit rows and 4-bit weights."""
    return stream_plan.sums_bytes(stream_w4a16_choice.COLUMNS[-1], num_sms)


def w4a8_sums_bytes(num_sms: int) -> int:
    """The same of a product of FP8 rows and 4-bit weights."""
    tiles = stream_w4a8_choice.TILES
    return max(stream_plan.sums_bytes(tile.columns, num_sms, tile.rows) for tile in tiles)


def written_out_bytes(weight: str, rows: str, num_experts: int, num_weights: int, dtype: torch.dtype) -> int:
    """Bytes of a copy of so many weights that a product of many rows on a GPU makes first, to read it whole.

    weight: "int4", "mxfp4" or "int8".  rows: "plain" or "fp8".  num_weights: of all experts.  dtype: of plain rows.
    0: products of the format make no copy, or none of this size.
    """
    kind = weight, rows, num_experts > 0
    if kind not in WRITTEN_OUT_BYTES:
        return 0
    num_bytes = num_weights * (WRITTEN_OUT_BYTES[kind] or dtype.itemsize)
    return 0 if kind in LIMITED_WRITE_OUTS and num_bytes > MOST_WRITTEN_OUT_BYTES else num_bytes
