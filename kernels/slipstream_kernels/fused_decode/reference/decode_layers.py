"""decode_layers in plain torch: the ops that it stands for, one after the other."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.decode_call import DecodeCall
from slipstream_kernels.attention.reference.decode_attention import decode_attention
from slipstream_kernels.gemm.reference.int4_mm import dequantize_int4
from slipstream_kernels.gemm.reference.skinny_gemm import skinny_gemm
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.kv.reference.rope_write_kv import rope_write_kv
from slipstream_kernels.layer_stack import LayerStack, ScaledRows, StackLayer, StackRows, StackWeight
from slipstream_kernels.norm.reference.rms_norm import rms_norm


def decode_layers(hidden: torch.Tensor, stack: LayerStack, rows: StackRows) -> torch.Tensor:
    """See ops.decode_layers."""
    residual = hidden
    for layer in stack.layers:
        normed = rms_norm(residual, layer.input_norm, stack.eps, None, None)
        assert isinstance(normed, torch.Tensor)
        residual = residual + _multiply(_attend(_multiply(normed, layer.qkv), layer, stack, rows), layer.o)
        normed = rms_norm(residual, layer.post_attention_norm, stack.eps, None, None)
        assert isinstance(normed, torch.Tensor)
        residual = residual + _multiply(_multiply(normed, layer.gate_up, gated=True), layer.down)
    return residual


def _multiply(x: torch.Tensor, weight: StackWeight, gated: bool = False) -> torch.Tensor:
    if isinstance(weight, ScaledRows):
        return skinny_gemm(x, weight.values, weight.scales, None, gated)
    if isinstance(weight, Int4Weight):
        if weight.is_repacked:
            from slipstream_kernels.gemm.int4_layout import canonical

            weight = canonical(weight)
        return skinny_gemm(x.float(), dequantize_int4(weight), None, None, gated).to(x.dtype)
    return skinny_gemm(x, weight, None, None, gated)


def _attend(heads: torch.Tensor, layer: StackLayer, stack: LayerStack, rows: StackRows) -> torch.Tensor:
    counts = (stack.num_q_heads, stack.num_kv_heads, stack.num_kv_heads)
    q, k, v = heads.unflatten(1, (-1, stack.head_dim)).split(counts, dim=1)
    q = rope_write_kv(q, k, v, rows.positions, rows.slot_mapping, stack.rope, layer.cache, None)
    out = torch.empty_like(q)
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    decode_attention(
        DecodeCall(
            q=q, key_cache=layer.cache.key, value_cache=layer.cache.value, block_tables=rows.block_tables,
            query_start_loc=starts, seq_lens=rows.seq_lens, out=out, max_query_len=1, scale=stack.scale,
            key_scale=layer.cache.key_scale, value_scale=layer.cache.value_scale, tree_mask=None, positions=None,
            sliding_window=None, alibi_slopes=None, soft_cap=None, is_prefix_settled=False,
        )
    )  # fmt: skip
    return out.flatten(1)
