"""Shape of draft tokens: a chain or a tree after a request's last token. Plain arithmetic.

A tree is a list of parents: parents[i] is the index of draft i's parent, -1 is the request's last token, and a parent
precedes its children. An empty list is a chain. Row 0 is the last token, row 1 + i is draft i.
Source: SpecInfer, arXiv:2305.09781.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

MAX_DRAFT_TOKENS = 63  # with the last token: the rows that the bits of one 64-bit mask word can name
_SIGN = 1 << 63


def parents_of(parents: Sequence[int], num_drafts: int) -> Sequence[int]:
    """One parent per draft; in a chain, the draft before it."""
    return parents or range(-1, num_drafts - 1)


def row_depths(parents: Sequence[int], num_drafts: int) -> Sequence[int]:
    """Distance of each row from the last token; [1 + num_drafts], the first is 0."""
    return _row_depths(tuple(parents), num_drafts)


def max_depth(parents: Sequence[int], num_drafts: int) -> int:
    """The depth of the deepest draft: 1 for the first level, 0 without drafts."""
    return max(row_depths(parents, num_drafts)) if parents else num_drafts


@lru_cache(maxsize=4096)
def _row_depths(parents: tuple[int, ...], num_drafts: int) -> tuple[int, ...]:
    depths = [0]
    for parent in parents_of(parents, num_drafts):
        depths.append(depths[parent + 1] + 1)
    return tuple(depths)


def row_paths(parents: Sequence[int], token_ids: Sequence[int]) -> list[tuple[int, ...]]:
    """The draft tokens on the path to each row, itself included; [1 + num_drafts], the first is empty."""
    paths: list[tuple[int, ...]] = [()]
    for parent, token_id in zip(parents_of(parents, len(token_ids)), token_ids):
        paths.append((*paths[parent + 1], token_id))
    return paths


def row_masks(parents: Sequence[int], num_drafts: int) -> Sequence[int]:
    """The rows that each row attends to, as bits of a signed 64-bit word: its ancestors and itself."""
    return _row_masks(tuple(parents), num_drafts)


@lru_cache(maxsize=4096)
def _row_masks(parents: tuple[int, ...], num_drafts: int) -> tuple[int, ...]:
    masks = [1]
    for row, parent in enumerate(parents_of(parents, num_drafts), 1):
        masks.append(masks[parent + 1] | 1 << row)
    return tuple(mask - (1 << 64) if mask & _SIGN else mask for mask in masks)


@lru_cache(maxsize=4096)
def rows_accepted(accepted: int, num_drafts: int) -> tuple[int, ...]:
    """The rows of a request's last token and of its accepted drafts, counted from its first row that was sampled.
    accepted: bit r: row r holds; bits of further rows say nothing."""
    return tuple(row for row in range(1 + num_drafts) if accepted >> row & 1)


def tokens_accepted(rows: Sequence[int], draft_token_ids: Sequence[int], following: int) -> list[int]:
    """The drafts of accepted rows and the token that was drawn after the last of them."""
    last = rows[-1]
    if last < len(rows):  # no draft between them was rejected
        return [*draft_token_ids[:last], following]
    return [*(draft_token_ids[row - 1] for row in rows[1:]), following]
