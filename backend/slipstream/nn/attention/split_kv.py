"""The attention backend for Hopper GPUs: short queries (decode, verify) by the split-KV kernel, prompts by the paged.

A step's decode rows come first, so a mixed step is two calls over slices of its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.attention.backend import ATTENTION_BACKENDS, HeadTurn, LayerCache
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.spec import DecoderSpec


@dataclass(frozen=True)
class Prompts:
    """The requests of a step that follow its decodes, as a step of their own."""

    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor


@dataclass(frozen=True)
class SplitKVStep:
    batch: ForwardBatch
    prompts: Prompts | None
    scale: float
    sliding_windows: tuple[int | None, ...]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn, cache: LayerCache, layer: int) -> Tensor:
        batch = self.batch
        q = ops.rope_write_kv(q, k, v, batch.positions, batch.slot_mapping, turn.rope, cache, turn.norms)
        out = torch.empty_like(q)
        window = self.sliding_windows[layer]
        if batch.num_decode_requests:
            self._attend_decodes(q, cache, window, out)
        if self.prompts is not None:
            self._attend_prompts(self.prompts, q, cache, window, out)
        return out

    def _attend_decodes(self, q: Tensor, cache: LayerCache, sliding_window: int | None, out: Tensor) -> None:
        batch, count = self.batch, self.batch.num_decode_requests
        ops.decode_attention(
            q[: batch.num_decode_tokens],
            cache.key,
            cache.value,
            batch.block_tables[:count],
            batch.query_start_loc[: count + 1],
            batch.seq_lens[:count],
            max_query_len=batch.max_decode_query_len,
            scale=self.scale,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
            sliding_window=sliding_window,
            out=out[: batch.num_decode_tokens],
        )

    def _attend_prompts(
        self, prompts: Prompts, q: Tensor, cache: LayerCache, sliding_window: int | None, out: Tensor
    ) -> None:
        batch = self.batch
        ops.paged_attention(
            q[batch.num_decode_tokens :],
            cache.key,
            cache.value,
            prompts.block_tables,
            prompts.query_start_loc,
            prompts.seq_lens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            scale=self.scale,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
            sliding_window=sliding_window,
            out=out[batch.num_decode_tokens :],
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

    def plan(self, batch: ForwardBatch) -> SplitKVStep:
        return SplitKVStep(batch, _prompts(batch), self._scale, self._sliding_windows)


def _prompts(batch: ForwardBatch) -> Prompts | None:
    """Views would do, but for kernels that are compiled once more for pointers that 16 does not divide."""
    first = batch.num_decode_requests
    if first == batch.seq_lens.shape[0]:
        return None
    if first == 0:
        return Prompts(batch.block_tables, batch.query_start_loc, batch.seq_lens)
    starts = batch.query_start_loc[first:] - batch.num_decode_tokens
    return Prompts(batch.block_tables[first:], starts, batch.seq_lens[first:].clone())


def _attend_once(spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> None:
    one = torch.ones(1, dtype=torch.int32, device=device)
    cache = ops.empty_kv_cache((1, spec.num_kv_heads, 64, spec.head_dim), dtype, device)
    ops.decode_attention(
        torch.zeros(1, spec.num_q_heads, spec.head_dim, dtype=dtype, device=device),
        cache.key,
        cache.value,
        (one - 1)[None],
        torch.tensor([0, 1], dtype=torch.int32, device=device),
        one,
        max_query_len=1,
        scale=1.0,
        backend="cuda",
    )
