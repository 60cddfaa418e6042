"""advance_rows: contract and choice.  The next verification's rows from this one's, without the host."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream_kernels.ops.accept_drafts import MAX_ROWS
from slipstream_kernels.ops.select import require_shape, select


class DraftRows(NamedTuple):
    """Drafts of each request, of which row 0 is its last token.  token_ids: [R, n] int64.  words: [R, n] int64, the
    rows that each draft sees, as bits; depths: [R, n] int64, from the last token; both None: chains."""

    token_ids: torch.Tensor
    words: torch.Tensor | None = None
    depths: torch.Tensor | None = None


class StepRows(NamedTuple):
    """The tensors of a step of verifications of 1 + n rows each, as nn/batch.py has them; written over."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    tree_mask: torch.Tensor | None


def advance_rows(
    rows: StepRows,
    num_requests: int,
    next_ids: torch.Tensor,
    last: torch.Tensor,
    drafts: DraftRows,
    block_size: int,
    *,
    backend: str = "auto",
) -> None:
    """Make of a verified step the one that follows: each request's token after `last`, and its drafts behind it.

    num_requests: those that are no padding, with 1 + n rows each from row 0 on.  next_ids: [T] int64, what was drawn
    after each row.  last: [R] int64, of each request the deepest row that holds.  A request whose blocks do not reach
    its last draft sees and writes nothing.
    """
    num_drafts = drafts.token_ids.shape[1]
    if not 0 < num_drafts < MAX_ROWS:
        raise ValueError(f"drafts: {num_drafts} a request, accepted: 1 to {MAX_ROWS - 1}")
    if num_requests * (1 + num_drafts) > rows.token_ids.shape[0] or num_requests > rows.seq_lens.shape[0]:
        raise ValueError(f"num_requests: {num_requests} with {1 + num_drafts} rows each do not fit into the step")
    for name, tensor in (("words", drafts.words), ("depths", drafts.depths)):
        if (tensor is None) != (drafts.words is None):
            raise ValueError(f"{name}: words and depths are given together")
        if tensor is not None:
            require_shape(name, tensor, tuple(drafts.token_ids.shape))
    if drafts.words is not None and rows.tree_mask is None:
        raise ValueError("words: the step has no tree_mask to put them into")
    implementation = select("advance_rows", backend, next_ids)
    implementation.advance_rows(rows, num_requests, next_ids, last, drafts, block_size)
