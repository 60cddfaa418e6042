"""update_step_inputs: contract and choice.  The next verification's rows from this one's, without the host."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream_kernels.select import require_shape, select
from slipstream_kernels.spec.accept_drafts import MAX_ROWS


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


def update_step_inputs(
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
    after each row.  last: [R] int64, of each request the deepest row that holds.  A request whose table ends, or says
    -1, before its last draft sees and writes nothing.

    The caller has checked, as only the host can, that each request holds blocks for the farthest that it may get:
    all n drafts, the token after them and 1 + n rows more.  An entry of a table behind a request's own blocks may be an
    old one, of a block that is another's by now; nothing here can tell, and it would be written to.
    """
    num_drafts = drafts.token_ids.shape[1]
    if not 0 < num_drafts < MAX_ROWS:
        raise ValueError(f"drafts: {num_drafts} a request, accepted: 1 to {MAX_ROWS - 1}")
    if num_requests * (1 + num_drafts) > rows.token_ids.shape[0] or num_requests > rows.seq_lens.shape[0]:
        raise ValueError(f"num_requests: {num_requests} with {1 + num_drafts} rows each do not fit into the step")
    _check_step(rows, next_ids)
    for name, tensor in (("last", last), ("drafts", drafts.token_ids), ("block_tables", rows.block_tables)):
        if tensor.shape[0] < num_requests or tensor.stride(-1) != 1:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, stride {tensor.stride()}; {num_requests} requests")
    for name, of_tree in (("words", drafts.words), ("depths", drafts.depths)):
        if (of_tree is None) != (drafts.words is None):
            raise ValueError(f"{name}: words and depths are given together")
        if of_tree is not None:
            require_shape(name, of_tree, tuple(drafts.token_ids.shape))
    if drafts.words is not None and rows.tree_mask is None:
        raise ValueError("words: the step has no tree_mask to put them into")
    implementation = select("spec.update_step_inputs", backend, next_ids)
    implementation.update_step_inputs(rows, num_requests, next_ids, last, drafts, block_size)


def _check_step(rows: StepRows, next_ids: torch.Tensor) -> None:
    """All of a step's rows lie one behind the other, in the types that the kernels read."""
    num_rows = rows.token_ids.shape[0]
    for name, tensor, dtype, count in (
        ("token_ids", rows.token_ids, torch.int64, num_rows),
        ("positions", rows.positions, torch.int64, num_rows),
        ("slot_mapping", rows.slot_mapping, torch.int64, num_rows),
        ("tree_mask", rows.tree_mask, torch.int64, num_rows),
        ("next_ids", next_ids, torch.int64, num_rows),
        ("seq_lens", rows.seq_lens, torch.int32, rows.seq_lens.shape[0]),
    ):
        if tensor is not None:
            require_shape(name, tensor, (count,))
            if tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(f"{name}: {tensor.dtype}, expected contiguous {dtype}")
    if rows.block_tables.dim() != 2 or rows.block_tables.dtype != torch.int32:
        raise ValueError(f"block_tables: {rows.block_tables.dtype} {tuple(rows.block_tables.shape)}, expected int32")
