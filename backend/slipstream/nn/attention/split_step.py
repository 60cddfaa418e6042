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


@dataclass(frozen=True)
class Rows:
    """Some requests that follow each other, as a step of their own, and the tokens that are theirs."""

    tokens: slice
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    max_query_len: int

    def operands(self, q: Tensor, cache: ops.KvCache) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the attention ops take by place.  q: of all rows of the step."""
        return q[self.tokens], cache.key, cache.value, self.block_tables, self.query_start_loc, self.seq_lens


@dataclass(frozen=True)
class SplitStep:
    """decodes: rows for the decode kernel, or rows of trees, None if there are none. prompts: the others, or None.

    has_decode_kernel: whether single rows go to the decode kernel, too, where they are taken from among others.
    fp8_queries: whether those of long prompts may be rounded to e4m3.
    """

    batch: ForwardBatch
    decodes: Rows | None
    prompts: Rows | None
    has_decode_kernel: bool
    fp8_queries: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, cache: ops.KvCache) -> Tensor:
        q = store_heads(self.batch, q, k, v, layer, cache)
        out = torch.empty_like(q)
        if self.decodes is not None and self.has_decode_kernel:
            self._attend_decodes(self.decodes, q, layer, cache, out)
        elif self.decodes is not None:
            attend_invariantly(self.batch, self.decodes, q, layer, cache, out)
        if self.prompts is not None:
            self._attend_prompts(self.prompts, q, layer, cache, out)
        return out

    def forward_last(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, cache: ops.KvCache) -> Tensor:
        batch = self.batch
        q = store_heads(batch, q, k, v, layer, cache)
        q = q[batch.logits_indices]
        if q.shape[0]:
            rows, out = last_rows(batch), torch.empty_like(q)
            if self.has_decode_kernel:
                self._attend_decodes(rows, q, layer, cache, out, is_prefix_settled=False)
            else:
                self._attend_prompts(rows, q, layer, cache, out)
            q = out
        return q

    def _attend_decodes(
        self,
        rows: Rows,
        q: Tensor,
        layer: LayerAttention,
        cache: ops.KvCache,
        out: Tensor,
        is_prefix_settled: bool = True,
    ) -> None:
        """is_prefix_settled: a step begins with the embedding, which is no kernel of ours; not for rows whose request
        has others in this step."""
        batch = self.batch
        ops.decode_attention(
            *rows.operands(q, cache),
            max_query_len=rows.max_query_len,
            scale=layer.scale,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
            tree_mask=batch.tree_mask,
            positions=None if batch.tree_mask is None else batch.positions[rows.tokens],
            sliding_window=layer.sliding_window,
            alibi_slopes=layer.alibi_slopes,
            soft_cap=layer.soft_cap,
            sinks=layer.sinks,
            is_prefix_settled=is_prefix_settled,
            out=out[rows.tokens],
        )

    def _attend_prompts(self, rows: Rows, q: Tensor, layer: LayerAttention, cache: ops.KvCache, out: Tensor) -> None:
        ops.paged_attention(
            *rows.operands(q, cache),
            max_query_len=rows.max_query_len,
            max_seq_len=self.batch.max_seq_len,
            scale=layer.scale,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
            sliding_window=layer.sliding_window,
            alibi_slopes=layer.alibi_slopes,
            soft_cap=layer.soft_cap,
            sinks=layer.sinks,
            fp8_queries=self.fp8_queries,
            fp8_probs=layer.fp8_probs,
            key_mean=layer.key_mean,
            out=out[rows.tokens],
        )


def attend_invariantly(
    batch: ForwardBatch,
    rows: Rows,
    q: Tensor,
    layer: LayerAttention,
    cache: ops.KvCache,
    out: Tensor,
    is_tree: bool = True,
) -> None:
    """Rows of a step by the op in Triton-lang that knows trees. is_tree: whether they have the batch's."""
    ops.invariant_attention(
        *rows.operands(q, cache),
        max_query_len=rows.max_query_len,
        max_seq_len=batch.max_seq_len,
        scale=layer.scale,
        key_scale=cache.key_scale,
        value_scale=cache.value_scale,
        tree_mask=batch.tree_mask if is_tree else None,
        positions=batch.positions[rows.tokens] if is_tree else None,
        sliding_window=layer.sliding_window,
        alibi_slopes=layer.alibi_slopes,
        soft_cap=layer.soft_cap,
        sinks=layer.sinks,
        out=out[rows.tokens],
    )


def store_heads(
    batch: ForwardBatch, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, cache: ops.KvCache
) -> Tensor:
    """The queries, normalised and rotated; keys, too, which go to the batch's slots with the values."""
    qk_rope = layer.qk_rope
    q = ops.rope_write_kv(q, k, v, batch.positions, batch.slot_mapping, qk_rope.rope, cache, qk_rope.norms)
    return qk_rope.scale_queries(q, batch.positions)


def decode_rows(batch: ForwardBatch) -> Rows | None:
    """The step's decode rows, as the batch counts them."""
    count = batch.num_decode_requests
    if count == 0:
        return None
    return Rows(
        slice(batch.num_decode_tokens),
        batch.block_tables[:count],
        batch.query_start_loc[: count + 1],
        batch.seq_lens[:count],
        batch.max_decode_query_len,
    )


def last_rows(batch: ForwardBatch) -> Rows:
    """The last rows of the requests of which logits are wanted, one each, as batch.logits_indices picks them."""
    rows = batch.logits_indices
    requests = torch.searchsorted(batch.query_start_loc, rows.to(torch.int32), right=True) - 1
    starts = torch.arange(rows.shape[0] + 1, dtype=torch.int32, device=rows.device)
    return Rows(slice(None), batch.block_tables[requests], starts, batch.seq_lens[requests], max_query_len=1)


def trees_and_chains(batch: ForwardBatch) -> tuple[Rows | None, Rows | None]:
    """A step's rows with a tree mask, which are its first, and all others; None where there are none."""
    trees = None if batch.tree_mask is None else decode_rows(batch)
    return trees, rows_after(batch, trees)


def rows_after(batch: ForwardBatch, decodes: Rows | None) -> Rows | None:
    """The requests that follow those; all, if there are none.

    Lengths are copied: for a view whose pointer 16 does not divide, Triton-lang compiles the kernels once more.
    """
    tables, starts, seq_lens = batch.block_tables, batch.query_start_loc, batch.seq_lens
    if decodes is None:
        return Rows(slice(None), tables, starts, seq_lens, batch.max_query_len)
    first, num_tokens = decodes.seq_lens.shape[0], decodes.tokens.stop
    if first == seq_lens.shape[0]:
        return None
    starts, seq_lens = starts[first:] - num_tokens, seq_lens[first:].clone()
    return Rows(slice(num_tokens, None), tables[first:], starts, seq_lens, batch.max_query_len)
