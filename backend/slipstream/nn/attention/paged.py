"""The attention backend over slipstream_kernels' paged ops: any mix of prefill, chunks and decode in one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream_kernels import ops

from slipstream.nn.attention.backend import GroupedStep, latent_refusal
from slipstream.nn.attention.split_step import SplitStep, decode_rows, rows_after, slots_of
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.kv_types import gpu_geometry_refusal
from slipstream.nn.spec import DecoderSpec


@dataclass(frozen=True)
class PagedAttention:
    spec: DecoderSpec

    @staticmethod
    def supports(
        spec: DecoderSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        return latent_refusal(spec)

    def graph_refusal(self, block_size: int, has_trees: bool = False) -> str | None:
        groups = [attention.num_q_heads // attention.num_kv_heads for attention in self.spec.attentions]
        most = ops.MAX_INVARIANT_GROUP
        trees = f"trees of drafts are the reference's where more than {most} query heads share a head of keys"
        is_refused = has_trees and max(groups) > most
        return gpu_geometry_refusal(self.spec, block_size) or (trees if is_refused else None)

    def plan(self, batch: ForwardBatch) -> GroupedStep:
        """All rows go to the paged op, which knows no trees: rows of a tree go to the invariant op, which does."""
        decodes = None if batch.tree_mask is None else decode_rows(batch)
        prompts = rows_after(batch, decodes)
        return SplitStep(batch, slots_of(batch), decodes, prompts, has_decode_kernel=False)
