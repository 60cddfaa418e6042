"""accept_drafts in plain torch, on any device: trees as 64-bit words, all requests at once."""

from __future__ import annotations

import torch

from slipstream_kernels.spec.accept_drafts import MAX_ROWS, AcceptedRows, VerifiedRows


def accept_drafts(step: VerifiedRows, out: AcceptedRows) -> None:
    """See ops.accept_drafts.  Everything below is [num_requests, 64], a column per row of the request."""
    token_ids, next_ids, query_start_loc, num_drafts, slot_mapping, tree_mask, marks, scores = step
    device = token_ids.device
    rows = torch.arange(MAX_ROWS, device=device)
    first = query_start_loc[1:].long() - 1 - num_drafts
    inside = rows <= num_drafts[:, None]
    row_indices = torch.where(inside, first[:, None] + rows, first[:, None])
    bits = torch.ones_like(rows) << rows
    words = (bits | (bits - 1)).expand_as(row_indices) if tree_mask is None else _words(tree_mask, row_indices, inside)
    words = torch.where(inside, words, 0)
    words[:, 0] = 1  # tree_mask may have the prompt's bits there
    # the mask word of a row's parent is the row's word without the row's own bit
    is_parent = words[:, None, :] == (words ^ bits)[:, :, None]
    said = (is_parent * next_ids[row_indices][:, None, :]).sum(dim=2)
    agrees = (said == token_ids[row_indices]) | (rows == 0)
    if marks is not None:
        mark = marks[row_indices]
        agrees = ((agrees & (mark >= 0)) | (mark > 0)) | (rows == 0)
    agreed = torch.where(agrees & inside, bits, 0).sum(dim=1)
    taken = inside & ((words & ~agreed[:, None]) == 0)
    depths = torch.where(taken, (words[:, :, None] >> rows & 1).sum(dim=2), 0)
    counts = depths.amax(dim=1)
    worth = torch.where(depths == counts[:, None], 0.0 if scores is None else scores[row_indices], float("-inf"))
    end = worth.argmax(dim=1, keepdim=True)
    path = words.gather(1, end)
    kept = (path >> rows & 1).bool() & inside
    out.paths.copy_(path[:, 0])
    out.counts.copy_(counts)
    out.last.copy_(first + end[:, 0])
    out.targets.copy_(slot_mapping[row_indices])
    order = torch.argsort(~kept, dim=1, stable=True)
    out.sources.copy_(slot_mapping[row_indices.gather(1, order)])


def _words(tree_mask: torch.Tensor, row_indices: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Mask words of the rows. Rows of requests without drafts may lie beyond tree_mask: they attend to themselves."""
    is_there = row_indices < tree_mask.shape[0]
    words = tree_mask[row_indices.clamp(max=tree_mask.shape[0] - 1)]
    return torch.where(is_there & inside, words, 1)
