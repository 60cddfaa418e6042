"""All libraries of CUDA kernels, as (source, macros), for building ahead of time and for the manifest of tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from slipstream_kernels.attention.cuda import (
    decode_attention,
    latent_attention,
    prefill_attention,
    prefill_stage,
    ragged_attention,
    verify_attention,
)
from slipstream_kernels.comm.cuda import rank_sum
from slipstream_kernels.cuda import cutlass
from slipstream_kernels.cuda.build import build
from slipstream_kernels.gemm.cuda import (
    int4_mm,
    int8_gemm,
    mixed_gemm,
    mixed_gemm_pairs,
    mixed_gemm_w4a8,
    mixed_gemm_w4a16,
    skinny_gemm,
    skinny_gemm_w4a16,
    stream_w4a8,
    stream_w4a16,
    swap_ab_gemm,
    swap_ab_stream,
    w4a8_gemm,
)
from slipstream_kernels.moe.cuda import (
    grouped_mxfp4_gemm,
    grouped_mxfp4_wide,
    grouped_stream,
    grouped_w4a8_gemm,
    grouped_w4a16_gemm,
    grouped_w4a16_wide,
)
from slipstream_kernels.sample.cuda import sample

Variant = tuple[str, tuple[str, ...]]


def variants() -> list[Variant]:
    """Libraries without CUTLASS; each compiles in seconds."""
    kernels = (
        prefill_attention,
        prefill_stage,
        decode_attention,
        verify_attention,
        latent_attention,
        ragged_attention,
        skinny_gemm,
        swap_ab_gemm,
        swap_ab_stream,
        mixed_gemm,
        sample,
        rank_sum,
        mixed_gemm_w4a8,
        stream_w4a8,
        mixed_gemm_w4a16,
        mixed_gemm_pairs,
        stream_w4a16,
        skinny_gemm_w4a16,
        grouped_w4a16_gemm,
        grouped_w4a16_wide,
        grouped_w4a8_gemm,
        grouped_mxfp4_gemm,
        grouped_mxfp4_wide,
        grouped_stream,
    )
    found = [(kernel.SOURCE, defines) for kernel in kernels for defines in kernel.variants()]
    return [*found, (int4_mm.DEQUANTISE, ()), (grouped_mxfp4_gemm.DEQUANTISE, ())]


def on_cutlass() -> list[Variant]:
    """Libraries with CUTLASS, for bf16 models; each compiles in about a minute."""
    return [(kernel.SOURCE, defines) for kernel in (w4a8_gemm, int8_gemm) for defines in kernel.variants()]


def builders() -> list[tuple[str, Callable[..., Path]]]:
    """The source of every library, and what builds it (into build's `folder`); those that take longest come first."""
    heavy = partial(build, flags=cutlass.FLAGS, headers=cutlass.include_folder)
    found = [(source, partial(heavy, source, defines)) for source, defines in on_cutlass()]
    return [*found, *((source, partial(build, source, defines)) for source, defines in variants())]
