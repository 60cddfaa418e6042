"""Medusa: all heads draft from the last hidden state; the most probable tokens of each form a fixed tree of drafts.

The tree is data: `medusa_choices` of the configuration, or the file of that name beside the heads, in the reference
syntax: each entry is a path of ranks, one per head. Source: arXiv:2401.10774.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from slipstream_kernels import ops

from slipstream.core.draft_methods import MedusaOptions
from slipstream.core.drafts import MAX_DRAFT_TOKENS, row_depths, row_masks
from slipstream.core.errors import ConfigError
from slipstream.nn.heads.medusa import MedusaHeads
from slipstream.worker.host_copy import to_device
from slipstream.worker.interface import DraftBudget, DraftTokens
from slipstream.worker.launched_step import ComputedRows
from slipstream.worker.spec_decode.draft_graphs import GraphedHead
from slipstream.worker.spec_decode.interface import (
    PROPOSERS,
    SpeculatorContext,
    read_head,
)
from slipstream.worker.spec_decode.planning import DraftMemory, Planning

CHOICES_FILE = "medusa_choices.json"
# The published tree of 63 nodes for 7B models, by falling value (mc_sim_7b_63), as ranks without separators.
_DEFAULT = (
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 "
    "011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
)
Choices = list[tuple[int, ...]]


def default_choices(num_heads: int) -> Choices:
    """The published tree, cut to the number of heads."""
    paths = [tuple(map(int, entry)) for entry in _DEFAULT.split()]
    return [path for path in paths if len(path) <= num_heads]


def parse_choices(text: str) -> Choices:
    """`{0},{0,0}` or `[[0],[0,0]]`; entries as given, but a parent before its children.

    Raises ConfigError for what is no tree of at most 63 nodes.
    """
    field = "medusa_choices"
    entries = re.findall(r"[\[{]([\d,\s]+)[\]}]", text)
    left = re.sub(r"[\[{][\d,\s]+[\]}]", "", text)
    if not entries or left.strip(" ,[]{}"):
        raise ConfigError(field, text, "accepted: paths of ranks like {0},{0,0},{1}")
    paths = [tuple(int(rank) for rank in entry.split(",") if rank.strip()) for entry in entries]
    known = set(paths)
    for path in paths:
        if len(path) > 1 and path[:-1] not in known:
            raise ConfigError(field, text, f"{list(path)} has no parent {list(path[:-1])}")
    if len(known) != len(paths) or len(paths) > MAX_DRAFT_TOKENS:
        raise ConfigError(field, text, f"accepted: at most {MAX_DRAFT_TOKENS} different paths")
    ordered: Choices = []
    for path in paths:
        ordered += [path[:size] for size in range(1, len(path) + 1) if path[:size] not in ordered]
    return ordered


@PROPOSERS.register("medusa")
class MedusaDrafter(GraphedHead):
    drafts_trees = True

    def __init__(self, context: SpeculatorContext) -> None:
        super().__init__()
        config, target = context.config, context.target
        folder = read_head(config, "medusa", lambda folder: folder)
        self._heads = MedusaHeads.load(target, folder)
        self._target = target
        configured = config.speculation.options_of(MedusaOptions).medusa_choices
        self._choices = _choices(configured, folder, self._heads.num_heads)
        self.num_drafts = min(config.speculation.num_draft_tokens or len(self._choices), len(self._choices))
        self.num_levels = max(map(len, self._choices))
        self._num_ranks = 1 + max(rank for path in self._choices for rank in path)
        indices = {path: index for index, path in enumerate(self._choices)}
        self._parents = [indices.get(path[:-1], -1) for path in self._choices]
        words, depths = row_masks(self._parents, len(self._choices)), row_depths(self._parents, len(self._choices))
        self._tree = to_device([*words[1:], *depths[1:]], torch.int64, context.hardware.device).view(2, -1)
        ranks = [(len(path) - 1) * self._num_ranks + path[-1] for path in self._choices]
        self._ranks = to_device(ranks, torch.int64, context.hardware.device)

    @staticmethod
    def planned(planning: Planning) -> DraftMemory:
        folder = read_head(planning.config, "medusa", lambda folder: folder)
        heads = MedusaHeads.empty(planning.target, folder)
        _choices(planning.config.speculation.options_of(MedusaOptions).medusa_choices, folder, heads.num_heads)
        return planning.memory_of(heads.tensors())

    def drafts(self, wanted: DraftBudget, tokens: list[int]) -> DraftTokens:
        """tokens: one per choice. Takes the first choices that fit; a parent precedes its children."""
        count = min(wanted.num_drafts, len(self._choices))
        if wanted.depth >= self._heads.num_heads:
            return DraftTokens(tokens[:count], self._parents[:count])
        chosen = [index for index, path in enumerate(self._choices[:count]) if len(path) <= wanted.depth]
        row_of = {-1: -1, **{index: row for row, index in enumerate(chosen)}}  # the end is near: fewer levels
        return DraftTokens([tokens[index] for index in chosen], [row_of[self._parents[index]] for index in chosen])

    def rows_of(self, tokens: torch.Tensor, num_drafts: int) -> ops.DraftRows:
        words, depths = self._tree[:, None, :num_drafts].expand(-1, len(tokens), -1)
        return ops.DraftRows(tokens[:, :num_drafts], words, depths)

    def _draft(self, rows: ComputedRows) -> torch.Tensor:
        """[num_requests, number of choices]."""
        logits = torch.stack(list(self._heads.logits(self._target.final(rows.hidden)[rows.last])), dim=1)
        any_token = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device).flatten()
        ranked = ops.top_logprobs(logits.flatten(0, 1), self._num_ranks, any_token).token_ids
        return ranked.view(len(logits), -1)[:, self._ranks]


def _choices(configured: str, folder: Path | None, num_heads: int) -> Choices:
    """The configured tree, else the one beside the heads, else the published one."""
    file = folder / CHOICES_FILE if folder is not None else None
    if configured:
        choices = parse_choices(configured)
    elif file is not None and file.exists():
        choices = parse_choices(json.dumps(json.loads(file.read_text())))
    else:
        choices = default_choices(num_heads)
    deepest = max(map(len, choices))
    if deepest > num_heads:
        raise ConfigError("medusa_choices", configured, f"has paths of {deepest} ranks, there are {num_heads} heads")
    return choices
