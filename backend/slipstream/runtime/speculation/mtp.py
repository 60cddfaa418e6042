"""MTP: a module of one layer follows the model over every token, and drafts a chain from its own guesses.

Its cache holds at slot i what it made of token i + 1 and the model's hidden state at i, for all tokens, so prompts pass
through it too. A request that it has not followed from its beginning (speculation paused meanwhile) stops speculating.
"""

from __future__ import annotations

from pathlib import Path

import torch
from slipstream_kernels import ops

from slipstream.core.errors import ConfigError
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.checkpoint_path import resolve_checkpoint
from slipstream.nn.decoder import Decoder
from slipstream.nn.heads.mtp import FIELD, MTPModule
from slipstream.runtime.kv_pool import allocate_pool
from slipstream.runtime.speculation.draft_batch import last_rows
from slipstream.runtime.speculation.draft_graphs import DraftGraphs
from slipstream.runtime.speculation.follower import Follower
from slipstream.runtime.speculation.following import FollowingProposer
from slipstream.runtime.speculation.proposer import PROPOSERS, Drafts, Surroundings, Wish

NUM_DRAFTS = 3


@PROPOSERS.register("mtp")
class MTPProposer(FollowingProposer):
    drafts_trees = False

    def __init__(self, surroundings: Surroundings) -> None:
        config, target = surroundings.config, surroundings.target
        assert target is not None
        self._target = target
        self._module = _load(surroundings, target)
        self.num_drafts = config.speculation.num_draft_tokens or NUM_DRAFTS
        self.num_scratch_slots = self.num_drafts
        (self._cache,) = allocate_pool(self._module.spec, surroundings.hardware, surroundings.plan).layers
        self._follower = Follower("mtp", surroundings, self.num_drafts)
        width = target.spec.hidden_size * (1 + len(target.feature_layers))
        refusal = self._module.backend.graph_refusal(surroundings.plan.block_size)
        batches = self._follower.batches
        self._graphs = DraftGraphs(self._draft, batches, surroundings, 1 + self.num_drafts, width, refusal)

    def _drafts(self, wish: Wish, guesses: list[int]) -> Drafts:
        return Drafts(guesses[: min(wish.num_drafts, wish.depth)])

    def _draft(self, batch: ForwardBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """hidden: the model's, for each row. Returns the drafts of each request, [num_requests, num_drafts]."""
        assert hidden is not None
        out = self._module.forward(batch, self._target.final(hidden), self._cache)[last_rows(batch)]
        levels = [ops.greedy(self._module.logits(out))]
        for level in range(1, self.num_drafts):
            depth = torch.full_like(levels[0][:1], level - 1)
            rows = self._follower.batches.rows_after(batch, levels[-1], depth, level - 1)
            out = self._module.forward(rows, out, self._cache)
            levels.append(ops.greedy(self._module.logits(out)))
        return torch.stack(levels, dim=1)


def _load(surroundings: Surroundings, target: Decoder) -> MTPModule:
    config, num_positions = surroundings.config, surroundings.plan.max_model_len
    folder = config.speculation.mtp_module
    if not folder and config.model.load_format == "dummy":
        return MTPModule.dummy(target, num_positions)
    try:
        return MTPModule.load(target, Path(resolve_checkpoint(folder or config.model.model)), num_positions)
    except ConfigError:
        if folder:
            raise
        raise ConfigError(
            FIELD, "", "needed for speculative_method mtp: the model's checkpoint has no module"
        ) from None
