"""update_step_inputs in Triton-lang: a program per request."""

from __future__ import annotations

import torch
import triton.language as tl

from slipstream_kernels.spec.accept_drafts import MAX_ROWS
from slipstream_kernels.spec.update_step_inputs import DraftRows, StepRows
from slipstream_kernels.triton.step_kernel import step_kernel


def update_step_inputs(
    rows: StepRows, num_requests: int, next_ids: torch.Tensor, last: torch.Tensor, drafts: DraftRows, block_size: int
) -> None:
    """See ops.update_step_inputs."""
    num_rows = 1 + drafts.token_ids.shape[1]
    words = drafts.token_ids if drafts.words is None else drafts.words
    depths = drafts.token_ids if drafts.depths is None else drafts.depths
    masks = rows.token_ids if rows.tree_mask is None else rows.tree_mask
    _advance_kernel[(num_requests,)](
        rows.token_ids,
        rows.positions,
        rows.slot_mapping,
        rows.seq_lens,
        rows.block_tables,
        masks,
        next_ids,
        last,
        drafts.token_ids,
        words,
        depths,
        rows.block_tables.stride(0),
        rows.block_tables.shape[1],
        drafts.token_ids.stride(0),
        words.stride(0),
        depths.stride(0),
        block_size,
        num_rows,
        HAS_TREE=drafts.words is not None,
        HAS_MASK=rows.tree_mask is not None,
        ROWS=MAX_ROWS,  # whatever the number of drafts: compiled once
        num_warps=1,
    )


@step_kernel
def _advance_kernel(token_ids_ptr, positions_ptr, slots_ptr, seq_lens_ptr, tables_ptr, masks_ptr, next_ids_ptr,
                    last_ptr, drafts_ptr, words_ptr, depths_ptr, table_stride, table_width, draft_stride, word_stride,
                    depth_stride, block_size, num_rows, HAS_TREE: tl.constexpr, HAS_MASK: tl.constexpr,
                    ROWS: tl.constexpr):  # fmt: skip
    """Grid (requests). Only the position of row `last` is both read and overwritten."""
    request = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    inside = rows < num_rows
    is_draft = inside & (rows > 0)
    last = tl.load(last_ptr + request)
    start = tl.load(positions_ptr + last) + 1
    first_id = tl.load(next_ids_ptr + last)
    token_positions = start + rows
    columns = token_positions // block_size
    is_there = inside & (columns < table_width)
    blocks = tl.load(tables_ptr + request * table_stride + columns, mask=is_there, other=-1).to(tl.int64)
    num_missing = tl.sum(tl.where(inside & (blocks < 0), 1, 0), axis=0)
    slots = tl.where(num_missing > 0, -1, blocks * block_size + token_positions % block_size)
    token_ids = tl.load(drafts_ptr + request * draft_stride + rows - 1, mask=is_draft, other=0)
    wide = rows.to(tl.int64)
    bits = (wide * 0 + 1) << wide
    words, depths = bits | (bits - 1), wide
    if HAS_TREE:
        words = tl.load(words_ptr + request * word_stride + rows - 1, mask=is_draft, other=1)
        depths = tl.load(depths_ptr + request * depth_stride + rows - 1, mask=is_draft, other=0)
    tl.debug_barrier()
    out = request * num_rows + rows
    tl.store(token_ids_ptr + out, tl.where(rows == 0, first_id, token_ids), mask=inside)
    tl.store(positions_ptr + out, start + depths, mask=inside)
    tl.store(slots_ptr + out, slots, mask=inside)
    tl.store(seq_lens_ptr + request, tl.where(num_missing > 0, 0, start + num_rows).to(tl.int32))
    if HAS_MASK:
        tl.store(masks_ptr + out, words, mask=inside)
