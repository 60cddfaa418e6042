"""A planned step of both backends: heads are rotated and stored, then its decode rows and its prompts attend apart.

A step's decode rows come first, so a mixed step is two calls over slices of its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.attention.backend import LayerAttention
from slipstream.nn.batch import ForwardBatch

ALL = slice(None)  # tokens of a step


@dataclass(frozen=True)
class Rows:
    """Some requests that follow each other, as a step of their own, and the tokens that are theirs."""

    tokens: slice
    metadata: ops.AttentionMetadata


@dataclass(frozen=True)
class SplitStep:
    """decodes: rows for the decode kernel, or rows of trees, None if there are none. prompts: the others, or None.

    has_decode_kernel: whether single rows go to the decode kernel, too, where they are taken from among others.
    """

    batch: ForwardBatch
    slots: ops.TokenSlots
    decodes: Rows | None
    prompts: Rows | None
    has_decode_kernel: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, cache: ops.KvCache) -> Tensor:
        q = store_heads(self.slots, q, k, v, layer, cache)
        out = torch.empty_like(q)
        of_decodes = ops.decode_attention if self.has_decode_kernel else ops.invariant_attention
        for attend, rows in ((of_decodes, self.decodes), (ops.paged_attention, self.prompts)):
            if rows is not None:
                attend(q[rows.tokens], cache, rows.metadata, layer.options, out=out[rows.tokens])
        return out

    def forward_last(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, cache: ops.KvCache) -> Tensor:
        q = store_heads(self.slots, q, k, v, layer, cache)[self.batch.logits_indices]
        if q.shape[0]:
            attend = ops.decode_attention if self.has_decode_kernel else ops.paged_attention
            q = attend(q, cache, last_metadata(self.batch), layer.options)
        return q


def store_heads(
    slots: ops.TokenSlots, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, cache: ops.KvCache
) -> Tensor:
    """The queries, normalised and rotated; keys, too, which go to the batch's slots with the values."""
    q = ops.rope_write_kv(q, k, v, slots, layer.qk_rope, cache)
    return layer.scale_queries(q, slots.positions)


def slots_of(batch: ForwardBatch, tokens: slice = ALL) -> ops.TokenSlots:
    """Where some tokens of a step are."""
    return ops.TokenSlots(batch.positions[tokens], batch.slot_mapping[tokens])


def decode_rows(batch: ForwardBatch) -> Rows | None:
    """The step's decode rows, as the batch counts them, with its trees.

    Their prefixes are settled: a step begins with the embedding, which is no kernel of ours.
    """
    count, tokens = batch.num_decode_requests, slice(batch.num_decode_tokens)
    if count == 0:
        return None
    metadata = ops.AttentionMetadata(
        batch.block_tables[:count],
        batch.query_start_loc[: count + 1],
        batch.seq_lens[:count],
        batch.max_decode_query_len,
        batch.max_seq_len,
        tree_mask=batch.tree_mask,
        positions=None if batch.tree_mask is None else batch.positions[tokens],
        is_prefix_settled=True,
    )
    return Rows(tokens, metadata)


def last_metadata(batch: ForwardBatch) -> ops.AttentionMetadata:
    """The metadata of the rows that batch.logits_indices picks: the last row of each request whose logits are wanted.

    Their prefixes are not settled: their requests may have other rows in this step.
    """
    rows = batch.logits_indices
    requests = torch.searchsorted(batch.query_start_loc, rows.to(torch.int32), right=True) - 1
    starts = torch.arange(rows.shape[0] + 1, dtype=torch.int32, device=rows.device)
    return ops.AttentionMetadata(
        batch.block_tables[requests], starts, batch.seq_lens[requests], 1, max_seq_len=batch.max_seq_len
    )


def trees_and_chains(batch: ForwardBatch) -> tuple[Rows, ...]:
    """A step's rows with a tree mask, which are its first, and all others, where there are such."""
    trees = None if batch.tree_mask is None else decode_rows(batch)
    return tuple(rows for rows in (trees, rows_after(batch, trees)) if rows is not None)


def rows_after(batch: ForwardBatch, decodes: Rows | None) -> Rows | None:
    """The requests that follow those; all, if there are none.

    Lengths are copied: for a view whose pointer 16 does not divide, Triton-lang compiles the kernels once more.
    """
    tables, starts, seq_lens, tokens = batch.block_tables, batch.query_start_loc, batch.seq_lens, ALL
    if decodes is not None:
        first, num_tokens = decodes.metadata.num_requests, decodes.tokens.stop
        if first == seq_lens.shape[0]:
            return None
        tables, starts, seq_lens = tables[first:], starts[first:] - num_tokens, seq_lens[first:].clone()
        tokens = slice(num_tokens, None)
    return Rows(tokens, ops.AttentionMetadata(tables, starts, seq_lens, batch.max_query_len, batch.max_seq_len))
