"""MTP: a module of one layer follows the model over every token, and drafts a chain from its own guesses.

Its cache holds at slot i what it made of token i + 1 and the model's hidden state at i, for all tokens, so prompts pass
through it too. A request that it has not followed from its beginning (speculation paused meanwhile) stops speculating.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from slipstream.core.errors import ConfigError
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.nn.checkpoint_path import resolve_checkpoint
from slipstream.nn.decoder import Decoder
from slipstream.nn.heads.mtp import FIELD, MTPModule
from slipstream.runtime.host_copy import HostCopy, to_device
from slipstream.runtime.kv_pool import allocate_pool
from slipstream.runtime.speculation.draft_batch import Span
from slipstream.runtime.speculation.follower import Follower
from slipstream.runtime.speculation.proposer import PROPOSERS, Drafts, StepResult, Surroundings, Wish

NUM_DRAFTS = 3


@PROPOSERS.register("mtp")
class MTPProposer:
    drafts_trees = False

    def __init__(self, surroundings: Surroundings) -> None:
        config, target = surroundings.config, surroundings.target
        assert target is not None
        self._target = target
        self._module = _load(surroundings, target)
        self._device = surroundings.hardware.device
        self.num_drafts = config.speculation.num_draft_tokens or NUM_DRAFTS
        self.num_scratch_slots = self.num_drafts
        (self._cache,) = allocate_pool(self._module.spec, surroundings.hardware, surroundings.plan).layers
        self._follower = Follower("mtp", surroundings)

    @staticmethod
    def refusal(params: SamplingParams) -> str | None:
        return None

    @torch.inference_mode()
    def propose(self, result: StepResult, wishes: Sequence[Wish]) -> list[Drafts]:
        followed = self._follower.follow(result)
        if followed is None:
            return [Drafts() for _ in wishes]
        assert result.hidden is not None
        rows = to_device(followed.rows, torch.int64, self._device)
        out = self._module.forward(followed.batch, self._target.final(result.hidden[rows]), self._cache)
        live = [place for place, wish in enumerate(wishes) if wish.computed in followed.last_rows]
        if not live:
            return [Drafts() for _ in wishes]
        chosen = [wishes[place] for place in live]
        ends = [followed.last_rows[wish.computed] for wish in chosen]
        chains = self._chains(chosen, out[to_device(ends, torch.int64, self._device)])
        drafts = [Drafts() for _ in wishes]
        for place, wish, chain in zip(live, chosen, zip(*chains)):
            drafts[place] = Drafts(list(chain[: min(wish.num_drafts, wish.depth)]))
        return drafts

    def forget(self, requests: Sequence[Request]) -> None:
        self._follower.forget(requests)

    def _chains(self, wishes: Sequence[Wish], hidden: torch.Tensor) -> list[list[int]]:
        """hidden: the module's output at each request's last row. Returns all requests' drafts, level by level."""
        levels = [self._module.logits(hidden).argmax(dim=-1)]
        for level in range(1, max(min(wish.num_drafts, wish.depth) for wish in wishes)):
            spans = [Span(wish.request, wish.request.num_tokens - 2 + level, 1) for wish in wishes]
            batch = self._follower.batches.build(spans, levels[-1])
            hidden = self._module.forward(batch, hidden, self._cache)
            levels.append(self._module.logits(hidden).argmax(dim=-1))
        (found,) = HostCopy((torch.stack(levels),)).lists()
        return found


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
