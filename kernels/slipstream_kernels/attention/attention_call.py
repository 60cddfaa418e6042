"""The arguments of attention over a paged KV cache: a step's requests, a layer's options, and one call.

Plain data.  A step makes its metadata once and a layer its options once; implementations get a call, already checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream_kernels.kv_cache import KvCache


@dataclass(frozen=True)
class AttentionMetadata:
    """The requests of one step, or some that follow each other in it, and what their rows see.

    block_tables: [num_requests, max_blocks] int32, -1 pads.  query_start_loc: [num_requests + 1] int32, starts at 0.
    seq_lens: [num_requests] int32, cached tokens including this step's; 0 marks a padding request, whose rows become
    zero.  Row i of a request is slot seq_len - query_len + i and sees slots up to its own.
    max_query_len, max_seq_len: host-side upper bounds that size grids (no device read, CUDA-graph safe).
    tree_mask: [num_tokens] int64: all slots before the request's rows are seen, of the rows' own slots those whose bit
    (slot - (seq_len - query_len)) is set; then queries have at most 64 tokens.  positions: [num_tokens] int64, with
    tree_mask only: the depth-wise position of each row, which ALiBi and the window use for it both as query and as key;
    not below seq_len - query_len.  Tree masks: SpecInfer, arXiv:2305.09781.
    is_prefix_settled: keys before these rows were written before the last copy or library call of the stream, as in an
    engine's step, not by a kernel of this package just before: reading them may begin early.  block_tables,
    query_start_loc and seq_lens must be so in any case.
    """

    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int
    tree_mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    is_prefix_settled: bool = False

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]


@dataclass(frozen=True)
class AttentionOptions:
    """How a layer attends.

    scale > 0 multiplies q.k (usually 1/sqrt(head_dim)).  sliding_window w: only position_q - position_k < w.
    soft_cap c: scores become c * tanh(score / c).  alibi_slopes: [num_q_heads] fp32, adds slope * (position_k -
    position_q).  sinks: [num_q_heads] fp32, a score of each head that takes part in the softmax without a value.

    Of ops.paged_attention alone:
    fp8_queries: of long prompts over an fp8 cache, queries may be rounded to e4m3 (per token and head), so that their
    product with keys runs at the tensor cores' double rate; cost: docs/measurements.  Only the cuda version does.
    fp8_probs: with fp8_queries, so may be probabilities, relative to their row's largest, so that both products do; not
    with soft_cap or alibi_slopes.
    key_mean: [num_kv_heads, head_dim] fp32, over a 16-bit or fp32 cache: queries, probabilities and values of long
    prompts may be rounded, and keys less this mean (stage_fp8).  The reference rounds those of all queries of more than
    16 tokens, cuda those of prompts that are worth a copy of their keys, triton none.  Not with soft_cap or sinks,
    which a mean changes, nor with alibi_slopes.
    num_kv_splits fixes the triton decode kernel's split of the keys, which otherwise follows the batch size (its
    rounding too); the reference ignores it.
    Sources: ALiBi, arXiv:2108.12409; FlashAttention-3, arXiv:2407.08608.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    fp8_queries: bool = False
    fp8_probs: bool = False
    key_mean: torch.Tensor | None = None
    num_kv_splits: int | None = None


@dataclass(frozen=True)
class AttentionCall:
    """q, out: [num_tokens, num_q_heads, head_dim]; out is contiguous."""

    q: torch.Tensor
    cache: KvCache
    metadata: AttentionMetadata
    options: AttentionOptions
    out: torch.Tensor
