"""The attention backend of CPUs: decodes of one row a request with what layers share made once, all else as `paged`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.attention.backend import GroupedStep, LayerAttention, latent_refusal
from slipstream.nn.attention.paged import PagedAttention
from slipstream.nn.attention.split_step import slots_of
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.spec import DecoderSpec


class CpuAttention(PagedAttention):
    @staticmethod
    def supports(
        spec: DecoderSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        if device.type != "cpu":
            return "needs a CPU"
        if kv_dtype not in (None, dtype):
            return f"keeps keys in {dtype}, not {kv_dtype}"
        for attention in spec.attentions:
            if attention.alibi_slopes or attention.soft_cap is not None or attention.sinks:
                return "knows no ALiBi, soft cap or sinks"
        return latent_refusal(spec)

    def plan(self, batch: ForwardBatch) -> GroupedStep:
        is_one_row_each = len(batch.token_ids) == len(batch.seq_lens) and batch.tree_mask is None
        if is_one_row_each and bool((batch.slot_mapping >= 0).all()):
            return CpuDecode(ops.CpuDecodeStep(slots_of(batch), batch.seq_lens, batch.block_tables), batch, self)
        return super().plan(batch)


@dataclass(frozen=True)
class CpuDecode:
    step: ops.CpuDecodeStep
    batch: ForwardBatch
    attention: CpuAttention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, cache: ops.KvCache) -> Tensor:
        if cache.dtype != q.dtype:  # a draft head's: heads choose their attention before the type of the cache is known
            return PagedAttention.plan(self.attention, self.batch).forward(q, k, v, layer, cache)
        q = self.step.rotate_and_store(q, k, v, layer.qk_rope, cache)
        q = layer.scale_queries(q, self.batch.positions)
        return self.step.attend(q, cache, layer.options)

    def forward_last(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, cache: ops.KvCache) -> Tensor:
        """All rows attend, of which those that are not wanted were not worth a plan of their own."""
        return self.forward(q, k, v, layer, cache)[self.batch.logits_indices]
