"""accept_drafts: contract and choice.  Selects the accepted drafts of a verified step on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream_kernels.select import require_shape, select

MAX_ROWS = 64  # of one request: bits of a mask word


class AcceptedRows(NamedTuple):
    """Accepted rows of each request: row 0 is its last token (always accepted), row 1 + i is draft i.

    paths: [R] int64, bit i: row i is accepted.  counts: [R] int32, number of accepted rows.  last: [R] int64, index of
    the deepest accepted row in the step.  sources, targets: [R, 64] int64 cache slots: the first counts[r] rows are to
    be copied from sources to targets, the rest is undefined.
    """

    paths: torch.Tensor
    counts: torch.Tensor
    last: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor

    def first(self, num_requests: int) -> AcceptedRows:
        return AcceptedRows(*(tensor[:num_requests] for tensor in self))


def empty_accepted_rows(num_requests: int, device: torch.device) -> AcceptedRows:
    """Uninitialised results."""
    words = torch.zeros(2, num_requests, dtype=torch.int64, device=device)
    slots = torch.zeros(2, num_requests, MAX_ROWS, dtype=torch.int64, device=device)
    counts = torch.ones(num_requests, dtype=torch.int32, device=device)
    return AcceptedRows(words[0], counts, words[1], slots[0], slots[1])


class VerifiedRows(NamedTuple):
    """The rows of a step with drafts, and what was drawn after them.

    token_ids, slot_mapping: [T] int64, the step's rows.  next_ids: [T] int64, the token drawn after each row.
    query_start_loc: [R + 1] int32.  num_drafts: [R] int32, at most 63: the last rows of each request are drafts.
    tree_mask: int64, a word per row as in AttentionMetadata, at least for requests with drafts; None: all chains.
    marks: [T] int8, 1: accept the draft whatever was drawn, -1: reject it.  scores: [T] fp32: among paths of equal
    length, accept the one whose last row scores highest; None: the first.
    """

    token_ids: torch.Tensor
    next_ids: torch.Tensor
    query_start_loc: torch.Tensor
    num_drafts: torch.Tensor
    slot_mapping: torch.Tensor
    tree_mask: torch.Tensor | None = None
    marks: torch.Tensor | None = None
    scores: torch.Tensor | None = None


def accept_drafts(rows: VerifiedRows, out: AcceptedRows | None = None, *, backend: str = "auto") -> AcceptedRows:
    """Accept the longest path of each request on which every draft equals the token drawn after its parent row.

    Trees as mask words: arXiv:2305.09781.
    """
    num_tokens, num_requests = rows.token_ids.shape[0], rows.num_drafts.shape[0]
    for name, tensor, dtype, shape in (
        ("token_ids", rows.token_ids, torch.int64, (num_tokens,)),
        ("next_ids", rows.next_ids, torch.int64, (num_tokens,)),
        ("slot_mapping", rows.slot_mapping, torch.int64, (num_tokens,)),
        ("query_start_loc", rows.query_start_loc, torch.int32, (num_requests + 1,)),
        ("num_drafts", rows.num_drafts, torch.int32, (num_requests,)),
        ("marks", rows.marks, torch.int8, (num_tokens,)),
        ("scores", rows.scores, torch.float32, (num_tokens,)),
    ):
        if tensor is not None:
            require_shape(name, tensor, shape)
            if tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(f"{name}: {tensor.dtype}, expected contiguous {dtype}")
    tree_mask = rows.tree_mask
    if tree_mask is not None and (tree_mask.dim() != 1 or tree_mask.dtype != torch.int64):
        raise ValueError(f"tree_mask: {tree_mask.dtype} {tuple(tree_mask.shape)}, expected int64 [rows]")
    if out is None:
        out = empty_accepted_rows(num_requests, rows.token_ids.device)
    select("spec.accept_drafts", backend, rows.token_ids).accept_drafts(rows, out)
    return out
