"""The product by clusters in CUDA: chooses a variant, fills its arguments, launches it.  Hopper only.

No device value is read on the host: CUDA-graph safe.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch

from slipstream_kernels.cuda.build import load, missing
from slipstream_kernels.cuda.device import hopper_refusal
from slipstream_kernels.cuda.launch import fields, launch
from slipstream_kernels.dependent_launch import copy_pace, launches_dependently
from slipstream_kernels.fp8 import E4M3, Fp8Rows
from slipstream_kernels.gemm.cuda import swap_ab_choice
from slipstream_kernels.gemm.cuda.swap_ab_choice import COLUMNS, MAX_TOKENS, UNIT_ROWS, Product, Variant

SOURCE = "sm90_swap_ab_gemm.cu"
OUTPUTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}

POINTERS = ("x", "weight", "x_scale", "scale", "bias", "out")
STRIDES = ("x_row_stride", "out_row_stride", "x_scale_stride", "scale_stride")
COUNTS = (
    "num_tokens", "num_units", "in_features", "is_dependent", "tiles", "splits", "is_gated", "copy_pace",
)  # fmt: skip


class SwapAbParams(ctypes.Structure):
    """csrc/params/swap_ab_params.h, field by field."""

    _fields_ = fields(POINTERS, STRIDES, COUNTS)


def refusal(x: torch.Tensor | Fp8Rows, weight: torch.Tensor) -> str | None:
    """Why this version cannot multiply these; None if it can."""
    values, num_tokens = (x.values, x.num_tokens) if isinstance(x, Fp8Rows) else (x, x.shape[0])
    if num_tokens > MAX_TOKENS:
        return f"{num_tokens} tokens are more than {MAX_TOKENS}"
    if any(tensor.data_ptr() % 16 for tensor in (values, weight)) or values.stride(0) * values.itemsize % 16:
        return "x or weight has rows that do not begin at multiples of 16 bytes"
    return product_refusal(weight.device, x.dtype, weight.dtype, weight.shape[0], weight.shape[1])


@lru_cache
def build_all(output: torch.dtype, weight: torch.dtype, by_blocks: bool, columns: tuple[int, ...]) -> None:
    """Libraries of a format, side by side: one after the other they would take a start 20 s and not 7."""
    with ThreadPoolExecutor(len(columns)) as pool:
        for _ in pool.map(lambda width: load(SOURCE, defines(output, weight, by_blocks, width)), columns):
            pass


@lru_cache(maxsize=4096)
def choose(
    device: torch.device, output: torch.dtype, weight: torch.dtype, by_blocks: bool, product: Product
) -> Variant:
    """The fastest variant by swap_ab_choice's estimates."""
    return swap_ab_choice.choose(
        product, lambda variant: count_clusters(device, output, weight, by_blocks, variant, product.gated)
    )


def count_clusters(
    device: torch.device, output: torch.dtype, weight: torch.dtype, by_blocks: bool, variant: Variant, gated: bool
) -> int:
    """How many clusters of the variant run at once on the device."""
    library = load(SOURCE, defines(output, weight, by_blocks, variant.columns))
    params = SwapAbParams(tiles=variant.tiles, splits=variant.splits, is_gated=gated)
    with torch.cuda.device(device):
        return int(library.slipstream_count_clusters(ctypes.byref(params)))


@lru_cache
def product_refusal(
    device: torch.device, output: torch.dtype, weight: torch.dtype, out_features: int, in_features: int
) -> str | None:
    """The same of rows at multiples of 16 bytes, with results of type `output`."""
    if (reason := hopper_refusal(device, "weight is")) is not None:
        return reason
    if output not in OUTPUTS:
        return f"x is {output}, not bfloat16 or float16"
    if out_features % UNIT_ROWS:
        return f"out_features {out_features} is not a multiple of {UNIT_ROWS}"
    if in_features * weight.itemsize % 16:
        return f"in_features {in_features} is not a multiple of {16 // weight.itemsize}"
    return missing(SOURCE, defines(output, weight, False, 64))


def swap_ab_gemm(
    x: torch.Tensor | Fp8Rows,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    gated: bool,
    variant: Variant | None = None,
) -> torch.Tensor:
    """See ops.swap_ab_gemm.  One launch.  variant: None: chosen by the sizes."""
    values, dtype, num_tokens = (
        (x.values, x.dtype, x.num_tokens) if isinstance(x, Fp8Rows) else (x, x.dtype, x.shape[0])
    )
    out_features = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((num_tokens, out_features), dtype=dtype, device=weight.device)
    if not num_tokens:
        return out
    product = Product(num_tokens, weight.shape[0], weight.shape[1] * weight.itemsize, gated)
    variant = variant or choose(weight.device, dtype, weight.dtype, _by_blocks(scales), product)
    library = load(SOURCE, defines(dtype, weight.dtype, _by_blocks(scales), variant.columns))
    params = SwapAbParams(
        x=values.data_ptr(),
        weight=weight.data_ptr(),
        x_scale=x.scales.data_ptr() if isinstance(x, Fp8Rows) else None,
        scale=None if scales is None else scales.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        x_row_stride=values.stride(0),
        out_row_stride=out.stride(0),
        x_scale_stride=x.scales.stride(1) if isinstance(x, Fp8Rows) else 0,
        scale_stride=scales.stride(0) if scales is not None and _by_blocks(scales) else 0,
        num_tokens=num_tokens,
        num_units=weight.shape[0] // UNIT_ROWS,
        in_features=weight.shape[1],
        is_dependent=launches_dependently(weight.device),
        tiles=variant.tiles,
        splits=variant.splits,
        is_gated=gated,
        copy_pace=copy_pace(weight.device),
    )
    launch("swap_ab_gemm", library, params, weight.device)
    return out


def _by_blocks(scales: torch.Tensor | None) -> bool:
    return scales is not None and scales.dim() == 2


def defines(output: torch.dtype, weight: torch.dtype, by_blocks: bool, columns: int) -> tuple[str, ...]:
    """The macros that choose a library."""
    name = "PlainTiles"
    if weight == E4M3:
        name = "BlockTiles" if by_blocks else "ChannelTiles"
    return (f"SLIPSTREAM_OUTPUT={OUTPUTS[output]}", f"SLIPSTREAM_TILES={name}", f"SLIPSTREAM_COLUMNS={columns}")


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    formats = [(E4M3, False), (E4M3, True)]
    return [
        defines(output, weight, by_blocks, columns)
        for output in OUTPUTS
        for weight, by_blocks in [(output, False), *formats]
        for columns in COLUMNS
    ]
