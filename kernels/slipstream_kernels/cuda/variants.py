"""All libraries of CUDA kernels, as (source, macros): what is built ahead of time, and what tests keep a record of."""

from __future__ import annotations

from slipstream_kernels.cuda import (
    cluster_mm,
    decode_attention,
    decode_layers,
    fragment_mm,
    int4_experts,
    int4_mm,
    int4_stream,
    int8_gemm,
    prefill_attention,
    prefill_stage,
    record_experts,
    sample,
    stream_mm,
    verify_attention,
    w4a8_gemm,
    w4a8_stream,
)

Variant = tuple[str, tuple[str, ...]]


def variants() -> list[Variant]:
    """Those that are compiled in seconds."""
    kernels = (
        prefill_attention,
        prefill_stage,
        decode_attention,
        decode_layers,
        verify_attention,
        stream_mm,
        cluster_mm,
        fragment_mm,
        sample,
        w4a8_stream,
    )
    found = [(kernel.SOURCE, defines) for kernel in kernels for defines in kernel.variants()]
    for kernel in (int4_stream, int4_experts, record_experts):
        found += kernel.variants()
    return [*found, (int4_mm.DEQUANTISE, ())]


def on_cutlass() -> list[Variant]:
    """Those on CUTLASS's headers, of bf16 models: a minute of compiling each."""
    return [(kernel.SOURCE, defines) for kernel in (w4a8_gemm, int8_gemm) for defines in kernel.variants()]
