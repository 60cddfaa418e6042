"""The fused decode kernel on a CPU (emulation.py), and its arguments drawn by chance."""

from __future__ import annotations

from dataclasses import dataclass

import emulation
import torch
from slipstream_kernels.fp8 import Fp8Scheme
from slipstream_kernels.fused_decode.cuda import decode_layers as cuda_layers
from slipstream_kernels.gemm.int4_layout import repack
from slipstream_kernels.gemm.reference.quantize_fp8 import quantize_fp8
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.kv_cache import FP8_DTYPE, KvCache, empty_kv_cache
from slipstream_kernels.layer_stack import LayerStack, ScaledRows, StackLayer, StackRows, StackWeight
from slipstream_kernels.rotation import Rope


def emulate(
    hidden: torch.Tensor, stack: LayerStack, rows: StackRows, launch: cuda_layers.Launch, seed: int
) -> torch.Tensor:
    """What fused_decode/cuda/decode_layers.py launches, on the CPU.  Raises if the grid's threads deadlock."""
    residual = torch.full_like(hidden, float("nan"))
    params, _kept = cuda_layers.arguments(hidden, stack, rows, residual, launch)
    emulation.run("emulate_layers.cc", cuda_layers.defines(stack), params, seed)
    return residual


@dataclass(frozen=True)
class Sizes:
    """Of a small model."""

    hidden: int = 512
    q_heads: int = 4
    kv_heads: int = 2
    intermediate: int = 768
    layers: int = 2
    block_size: int = 16
    num_blocks: int = 64


def draw_weight(out_features: int, in_features: int, kind: str, device: torch.device) -> StackWeight:
    weight = torch.randn(out_features, in_features, device=device) / in_features**0.5
    if kind == "bf16":
        return weight.bfloat16()
    if kind == "fp8":
        rows = quantize_fp8(weight.bfloat16(), Fp8Scheme())
        return ScaledRows(
            rows.values[:out_features].contiguous(), rows.scales.view(-1)[:out_features].float().contiguous()
        )
    codes = torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8, device=device)
    groups = (out_features, in_features // 128)
    scales = (0.5 + torch.rand(groups, device=device)) / (4.6 * in_features**0.5)
    zeros = torch.randint(6, 10, groups, dtype=torch.uint8, device=device)
    return repack(Int4Weight(codes, scales, zeros, 128, out_features, in_features))


def draw_cache(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> KvCache:
    """A random cache; some blocks that must not be read hold NaN."""
    shape = (sizes.num_blocks, sizes.kv_heads, sizes.block_size, 128)
    scales = (0.5 + torch.rand(2, sizes.kv_heads, device=device)).unbind() if dtype == FP8_DTYPE else None
    cache = empty_kv_cache(shape, dtype, device, scales)
    for tensor in (cache.key, cache.value):
        tensor.copy_(torch.randn(shape, device=device).to(dtype))
    return cache


def draw_stack(sizes: Sizes, kind: str, kv: torch.dtype, device: torch.device) -> LayerStack:
    q_size, kv_size = sizes.q_heads * 128, sizes.kv_heads * 128
    layers = tuple(
        StackLayer(
            draw_weight(q_size + 2 * kv_size, sizes.hidden, kind, device),
            draw_weight(sizes.hidden, q_size, kind, device),
            draw_weight(2 * sizes.intermediate, sizes.hidden, kind, device),
            draw_weight(sizes.hidden, sizes.intermediate, kind, device),
            *(1 + 0.1 * torch.randn(2, sizes.hidden, device=device)).bfloat16().unbind(),
            draw_cache(sizes, kv, device),
        )
        for _ in range(sizes.layers)
    )
    angles = torch.rand(sizes.num_blocks * sizes.block_size, 64, device=device) * 6.28
    rope = Rope(torch.cat((angles.cos(), angles.sin()), dim=1).contiguous())
    return LayerStack(layers, sizes.q_heads, sizes.kv_heads, 128, rope, 1e-5, 128**-0.5)


def draw_rows(sizes: Sizes, seq_lens: list[int], device: torch.device) -> StackRows:
    """Scattered blocks; a length of 0 pads."""
    widest = max(1, *(-(-length // sizes.block_size) for length in seq_lens))
    order = iter(torch.randperm(sizes.num_blocks).tolist())
    tables = torch.full((len(seq_lens), widest), -1, dtype=torch.int32)
    slots = []
    for request, length in enumerate(seq_lens):
        for block in range(-(-length // sizes.block_size)):
            tables[request, block] = next(order)
        last = length - 1
        slots.append(
            int(tables[request, last // sizes.block_size]) * sizes.block_size + last % sizes.block_size
            if length
            else -1
        )
    return StackRows(
        torch.tensor([max(length - 1, 0) for length in seq_lens], device=device),
        torch.tensor(slots, device=device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        tables.to(device),
    )
