"""update_step_inputs: contract and choice.  Inputs of the next verification from this one's, without the host."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream_kernels.select import require_shape, select
from slipstream_kernels.spec.accept_drafts import MAX_ROWS


class DraftRows(NamedTuple):
    """Drafts of each request, behind its last token (row 0).  token_ids: [R, n] int64.  words: [R, n] int64, mask words
    of the rows that each draft attends to; depths: [R, n] int64, from the last token; both None: chains."""

    token_ids: torch.Tensor
    words: torch.Tensor | None = None
    depths: torch.Tensor | None = None


class StepRows(NamedTuple):
    """Tensors of a step with 1 + n rows per request, as in nn/batch.py; overwritten."""

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
    """Overwrite a verified step with the next one: each request's token after row `last`, then its drafts.

    num_requests: without padding, with 1 + n rows each from row 0 on.  next_ids: [T] int64, the token drawn after each
    row.  last: [R] int64, the deepest accepted row of each request.  A request whose block table ends, or has -1,
    before its last draft attends to nothing and writes nothing.

    The caller ensures that each request holds blocks for its longest outcome: all n drafts, the token after them, and
    1 + n more rows.  Block table entries beyond a request's blocks may be stale; this op cannot detect that and would
    write to blocks of other requests.
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
    """Raise ValueError unless the step's tensors are contiguous and of the types that kernels read."""
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
