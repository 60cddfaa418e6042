"""Steps with drafts that nobody asked for: the first drafts of a request shall find all kernels compiled.

Engine thread, once at start. CUDA graphs compile what they capture; models in stages have none of such steps, and with
`cuda_graphs: off` nothing is captured.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from slipstream_kernels import ops

from slipstream.core.drafts import row_masks
from slipstream.nn.batch import ForwardBatch
from slipstream.worker.graph_shapes import DraftLayout
from slipstream.worker.input_batch import padding_batch
from slipstream.worker.kv_cache import Compaction


def padding_drafts(layout: DraftLayout, max_blocks: int, device: torch.device) -> list[ForwardBatch]:
    """Steps of one request with a chain of drafts and, where there may be some, with a tree; see padding_batch.

    Empty where nothing drafts."""
    if not layout.num_drafts:
        return []
    plain = padding_batch(1 + layout.num_drafts, max_blocks, device)
    chain = replace(plain, logits_indices=torch.arange(1 + layout.num_drafts, device=device))
    words = torch.tensor(row_masks((), layout.num_drafts), dtype=torch.int64, device=device)
    return [chain, replace(chain, tree_mask=words)] if layout.has_trees else [chain]


def warm_up_acceptance(
    batch: ForwardBatch, out: ops.AcceptedRows, compactions: Sequence[Compaction], block_size: int
) -> None:
    """Run all that follows the draws of a verification, in each of its forms; nothing is accepted, and nothing moved.

    batch: of one request. out: where its accepted rows are written."""
    device, num_rows = batch.token_ids.device, len(batch.token_ids)
    none, next_ids = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros_like(batch.token_ids)
    marks = torch.zeros(num_rows, dtype=torch.int8, device=device)
    tensors = batch.token_ids, next_ids, batch.query_start_loc, none, batch.slot_mapping, batch.tree_mask
    for own_marks, scores in ((None, None), (marks, None), (marks, marks.float())):
        ops.accept_drafts(ops.VerifiedRows(*tensors, own_marks, scores), out)
    drafts = [ops.DraftRows(next_ids[None, 1:])]
    if batch.tree_mask is not None:
        for compaction in compactions:
            compaction.warm_up()
        drafts.append(ops.DraftRows(next_ids[None, 1:], next_ids[None, 1:] + 3, next_ids[None, 1:] + 1))
    for one in drafts:
        of_step = batch.token_ids, batch.positions, batch.slot_mapping, batch.seq_lens, batch.block_tables
        step = ops.StepRows(*copy.deepcopy(of_step), copy.deepcopy(batch.tree_mask))
        ops.update_step_inputs(step, 1, next_ids, out.last, one, block_size)
