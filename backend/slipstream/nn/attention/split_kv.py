"""The attention backend for Hopper GPUs: short queries (decode, verify) by the split-KV kernel, prompts by the paged.

A step that holds a longer query goes to the paged ops whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream_kernels import ops
from slipstream_kernels.ops.decode_attention import MAX_QUERY_LEN
from torch import Tensor

from slipstream.nn.attention.backend import ATTENTION_BACKENDS, LayerCache, StepAttention
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.spec import DecoderSpec


@dataclass(frozen=True)
class SplitKVStep:
    batch: ForwardBatch
    scale: float
    sliding_windows: tuple[int | None, ...]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, layer: int) -> Tensor:
        batch = self.batch
        key_cache, value_cache = cache
        ops.write_kv(k, v, key_cache, value_cache, batch.slot_mapping)
        return ops.decode_attention(
            q,
            key_cache,
            value_cache,
            batch.block_tables,
            batch.query_start_loc,
            batch.seq_lens,
            max_query_len=batch.max_query_len,
            scale=self.scale,
            sliding_window=self.sliding_windows[layer],
            is_prefix_settled=True,
        )


@ATTENTION_BACKENDS.register("split_kv")
class SplitKVAttention:
    def __init__(self, spec: DecoderSpec) -> None:
        from slipstream.nn.attention.paged import PagedAttention  # here, so that it is registered after this one

        self._paged = PagedAttention(spec)
        self._scale = spec.head_dim**-0.5
        self._sliding_windows = spec.sliding_windows

    @staticmethod
    def supports(spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        """Tries it: the kernel is built here, if it is not in the cache, and not in the first step."""
        if device.type != "cuda":
            return "needs a CUDA device"
        try:
            _attend_once(spec, device, dtype)
        except (ValueError, RuntimeError) as error:
            return str(error)
        return None

    def graph_refusal(self, block_size: int) -> str | None:
        return self._paged.graph_refusal(block_size)

    def plan(self, batch: ForwardBatch) -> StepAttention:
        if batch.max_query_len > MAX_QUERY_LEN:
            return self._paged.plan(batch)
        return SplitKVStep(batch, self._scale, self._sliding_windows)


def _attend_once(spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> None:
    one = torch.ones(1, dtype=torch.int32, device=device)
    cache = torch.zeros(1, spec.num_kv_heads, 64, spec.head_dim, dtype=dtype, device=device)
    ops.decode_attention(
        torch.zeros(1, spec.num_q_heads, spec.head_dim, dtype=dtype, device=device),
        cache,
        cache,
        (one - 1)[None],
        torch.tensor([0, 1], dtype=torch.int32, device=device),
        one,
        max_query_len=1,
        scale=1.0,
        backend="cuda",
    )
