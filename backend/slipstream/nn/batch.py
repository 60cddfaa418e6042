"""ForwardBatch: the tensors of one engine step, as the decoder takes them. Built by the worker."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

# Max rows of a decode or verify request: the bits of one row's tree mask.
MAX_DECODE_QUERY_LEN = 64


@dataclass(frozen=True)
class GroupTensors:
    """What differs between KV groups: as in ForwardBatch, which has the first group's."""

    block_tables: Tensor
    slot_mapping: Tensor


@dataclass(frozen=True)
class GivenRows:
    """Tokens whose embedding is given. rows: [G] int64, of the batch. values: [G, hidden_size], as a table has them."""

    rows: Tensor
    values: Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """T tokens of R requests in one varlen batch, on the model's device.

    Row i of request r is token query_start_loc[r] + i; its keys are the first positions+1 tokens of that request.
    token_ids, positions, slot_mapping: [T] int64 (slot -1: a padding row, nothing is written for it).
    query_start_loc: [R + 1] int32. seq_lens: [R] int32, tokens of each request after this step.
    block_tables: [R, max_blocks] int32, -1 pads. logits_indices: [S] int64, the rows whose logits are needed.
    max_query_len, max_seq_len: upper bounds known to the host, so that no kernel choice synchronises.
    num_decode_requests, num_decode_tokens: the leading decode and verify requests (at most max_decode_query_len tokens
    each) and their tokens; prompts of any length follow.
    tree_mask: [num_decode_tokens] int64, None if all drafts are chains: a word per decode row, whose bits are the rows
    of its request that it attends to (core/drafts.py). positions then count the depth in the tree.
    prompt_prefixes: of each request past num_decode_requests, at most how many cached tokens are before this step's;
    None if the host does not know, as in a CUDA graph.
    other_groups: of further KV groups (core/kv_groups.py), whose layers' keys lie in other blocks.
    given: tokens that bring their embeddings; such a batch runs eagerly.
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
    other_groups: tuple[GroupTensors, ...] = ()
    prompt_prefixes: tuple[int, ...] | None = None
    given: GivenRows | None = None

    def of_group(self, group: int) -> ForwardBatch:
        """The batch as the layers of one group see it."""
        if group == 0:
            return self
        own = self.other_groups[group - 1]
        return replace(self, block_tables=own.block_tables, slot_mapping=own.slot_mapping)
