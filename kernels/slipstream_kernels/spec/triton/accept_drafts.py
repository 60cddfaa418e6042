"""accept_drafts in Triton-lang: a program per request compares all pairs of its rows at once."""

from __future__ import annotations

import triton.language as tl

from slipstream_kernels.spec.accept_drafts import MAX_ROWS, AcceptedRows, VerifiedRows
from slipstream_kernels.triton.step_kernel import step_kernel

_NUM_WARPS = 4  # 64 x 64 comparisons


def accept_drafts(rows: VerifiedRows, out: AcceptedRows) -> None:
    """See ops.accept_drafts."""
    token_ids, tree_mask, marks, scores = rows.token_ids, rows.tree_mask, rows.marks, rows.scores
    _accept_kernel[(rows.num_drafts.shape[0],)](
        token_ids,
        rows.next_ids,
        rows.query_start_loc,
        rows.num_drafts,
        rows.slot_mapping,
        token_ids if tree_mask is None else tree_mask,
        token_ids if marks is None else marks,
        token_ids if scores is None else scores,
        *out,
        0 if tree_mask is None else tree_mask.shape[0],
        HAS_TREE=tree_mask is not None,
        HAS_MARKS=marks is not None,
        HAS_SCORES=scores is not None,
        ROWS=MAX_ROWS,
        num_warps=_NUM_WARPS,
    )


@step_kernel
def _accept_kernel(token_ids_ptr, next_ids_ptr, starts_ptr, num_drafts_ptr, slots_ptr, masks_ptr, marks_ptr, scores_ptr,
                   paths_ptr, counts_ptr, last_ptr, sources_ptr, targets_ptr, num_words,
                   HAS_TREE: tl.constexpr, HAS_MARKS: tl.constexpr, HAS_SCORES: tl.constexpr,
                   ROWS: tl.constexpr):  # fmt: skip
    """Grid (requests). A word has a bit per row that a row sees, itself included."""
    request = tl.program_id(0)
    num_drafts = tl.load(num_drafts_ptr + request)
    first = tl.load(starts_ptr + request + 1) - 1 - num_drafts
    rows = tl.arange(0, ROWS)
    wide = rows.to(tl.int64)
    inside = rows <= num_drafts
    bits = (wide * 0 + 1) << wide
    if HAS_TREE:
        words = tl.load(masks_ptr + first + rows, mask=inside & (first + rows < num_words), other=1)
    else:
        words = bits | (bits - 1)
    words = tl.where(rows == 0, 1, tl.where(inside, words, 0))  # tree_mask may have the prompt's bits there
    drawn = tl.load(next_ids_ptr + first + rows, mask=inside, other=-1)
    drafts = tl.load(token_ids_ptr + first + rows, mask=inside, other=-2)
    # the mask word of a row's parent is the row's word without the row's own bit
    is_parent = words[None, :] == (words ^ bits)[:, None]
    agrees = tl.sum(tl.where(is_parent, drawn[None, :], 0), axis=1) == drafts
    if HAS_MARKS:
        marks = tl.load(marks_ptr + first + rows, mask=inside, other=0)
        agrees = (agrees & (marks >= 0)) | (marks > 0)
    agreed = tl.sum(tl.where((agrees | (rows == 0)) & inside, bits, 0), axis=0)
    taken = inside & ((words & ~agreed) == 0)
    depths = tl.where(taken, tl.sum((words[:, None] >> wide[None, :]) & 1, axis=1), 0)
    count = tl.max(depths, axis=0)
    among = taken & (depths == count)
    if HAS_SCORES:
        scores = tl.load(scores_ptr + first + rows, mask=inside, other=0.0)
        best = tl.max(tl.where(among, scores, float("-inf")), axis=0)
        among = among & (scores == best)
    end = tl.min(tl.where(among, rows, ROWS), axis=0)
    path = tl.sum(tl.where(rows == end, words, 0), axis=0)
    tl.store(paths_ptr + request, path)
    tl.store(counts_ptr + request, count.to(tl.int32))
    tl.store(last_ptr + request, (first + end).to(tl.int64))
    kept = inside & (((path >> wide) & 1) == 1)
    indices = tl.sum(tl.where((rows[None, :] < rows[:, None]) & kept[None, :], 1, 0), axis=1)
    slots = tl.load(slots_ptr + first + rows, mask=inside, other=-1)
    tl.store(sources_ptr + request * ROWS + indices, slots, mask=kept)
    tl.store(targets_ptr + request * ROWS + rows, slots, mask=inside)
