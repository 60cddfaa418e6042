"""ForwardBatch: the tensors of one engine step, passed to the decoder as they are. Built by the runtime."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Queries of a request up to which its rows count as decode rows: what one row's 64-bit tree mask can name.
MAX_DECODE_QUERY_LEN = 64


@dataclass(frozen=True)
class ForwardBatch:
    """T tokens of R requests in one varlen batch, on the model's device.

    Row i of request r is token query_start_loc[r] + i; its keys are the first positions+1 tokens of that request.
    token_ids, positions, slot_mapping: [T] int64 (slot -1: a padding row, nothing is written for it).
    query_start_loc: [R + 1] int32. seq_lens: [R] int32, tokens of each request once this step is done.
    block_tables: [R, max_blocks] int32, -1 pads. logits_indices: [S] int64, the rows of which logits are wanted.
    max_query_len, max_seq_len: upper bounds known to the host, so that no kernel choice waits for the device.
    num_decode_requests, num_decode_tokens: the first requests, whose queries are short (decode and verify rows, at
    most max_decode_query_len tokens each), and their tokens; what follows are prompts, among which any may be short.
    tree_mask: [num_decode_tokens] int64, None if the drafts of all are chains: a word per decode row, whose bits name
    the rows of its own request that it sees (core/drafts.py). positions are then those of the depth in the tree.
    """

    token_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    logits_indices: Tensor
    max_query_len: int
    max_seq_len: int
    num_decode_requests: int
    num_decode_tokens: int
    max_decode_query_len: int
    tree_mask: Tensor | None = None
