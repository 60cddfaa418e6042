"""Attention backends for Hopper GPUs: decode and verify rows by the split-KV kernel, prompts by the paged op.

Over an FP8 cache, split_kv_fp8 lets long prompts multiply keys in FP8, as other engines do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream_kernels import ops

from slipstream.nn.attention.backend import latent_refusal
from slipstream.nn.attention.split_step import SplitStep, decode_rows, rows_after, slots_of
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.kv_types import gpu_geometry_refusal
from slipstream.nn.layer_spec import AttentionSpec
from slipstream.nn.spec import DecoderSpec


@dataclass(frozen=True)
class SplitKVAttention:
    """Queries stay as they are."""

    spec: DecoderSpec

    @staticmethod
    def supports(
        spec: DecoderSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        """Tries it: the kernel is built here, if it is not in the cache, and not in the first step."""
        if device.type != "cuda":
            return "needs a CUDA device"
        if latent_refusal(spec) is not None:
            return latent_refusal(spec)
        try:
            for attention in spec.attentions:
                _attend_once(attention, device, dtype, kv_dtype or dtype)
        except (ValueError, RuntimeError) as error:
            return str(error)
        return None

    def graph_refusal(self, block_size: int, has_trees: bool = False) -> str | None:
        return gpu_geometry_refusal(self.spec, block_size)

    def plan(self, batch: ForwardBatch) -> SplitStep:
        """More requests than the decode kernel takes go to the paged op, or with trees to the invariant op."""
        has_decode_kernel = batch.seq_lens.shape[0] <= ops.MAX_DECODE_REQUESTS
        decodes = decode_rows(batch) if has_decode_kernel or batch.tree_mask is not None else None
        prompts = rows_after(batch, decodes)
        return SplitStep(batch, slots_of(batch), decodes, prompts, has_decode_kernel)


class SplitKVFp8Attention(SplitKVAttention):
    """Queries of long prompts are rounded to e4m3, each head of a token by its own largest element: the layers' options
    say so (key_means.round_queries)."""

    @staticmethod
    def supports(
        spec: DecoderSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        if kv_dtype != ops.QUANTIZED_KV_DTYPES["fp8_e4m3"]:
            return "needs kv_cache_dtype=fp8_e4m3"
        for attention in spec.attentions:
            if attention.head_dim != ops.FP8_QUERY_HEAD_DIM:
                return f"rounds queries of heads of {ops.FP8_QUERY_HEAD_DIM}, not {attention.head_dim}"
        return SplitKVAttention.supports(spec, device, dtype, kv_dtype)


def _attend_once(spec: AttentionSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    one = torch.ones(1, dtype=torch.int32, device=device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    options = ops.AttentionOptions(
        1.0,
        soft_cap=spec.soft_cap,
        alibi_slopes=torch.tensor(spec.alibi_slopes, device=device) if spec.alibi_slopes else None,
        sinks=torch.zeros(spec.num_q_heads, device=device) if spec.sinks else None,
    )
    cache = ops.empty_kv_cache((1, spec.num_kv_heads, 64, spec.head_dim), kv_dtype, device)
    ops.decode_attention(
        torch.zeros(1, spec.num_q_heads, spec.head_dim, dtype=dtype, device=device),
        cache,
        ops.AttentionMetadata((one - 1)[None], starts, one, max_query_len=1, max_seq_len=1),
        options,
        backend="cuda",
    )
