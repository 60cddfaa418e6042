"""MTP: a module of one decoder layer reads every token after the model and drafts a chain from its own tokens.

Slot i of its KV cache is made from token i + 1 and the model's hidden state at i, so the module runs over prompts too.
A request with a gap in this cache (speculation was paused) stops speculating.
"""

from __future__ import annotations

from pathlib import Path

import torch
from slipstream_kernels import ops

from slipstream.nn.batch import ForwardBatch
from slipstream.nn.decoder import Decoder
from slipstream.nn.heads.mtp import MTPModule
from slipstream.worker.interface import DraftBudget, DraftTokens
from slipstream.worker.spec_decode.autoregressive_head import AutoregressiveHead
from slipstream.worker.spec_decode.interface import PROPOSERS, SpeculatorContext, read_head
from slipstream.worker.spec_decode.planning import DraftMemory, Planning

NUM_DRAFTS = 3


@PROPOSERS.register("mtp")
class MTPHead(AutoregressiveHead):
    def __init__(self, context: SpeculatorContext) -> None:
        target = context.target
        self._target = target
        self._module = _load(context, target)
        super().__init__(context, self._module.spec)
        self.num_drafts = context.config.speculation.num_draft_tokens or NUM_DRAFTS
        self.num_levels = self.num_scratch_slots = self.num_drafts

    @staticmethod
    def planned(planning: Planning) -> DraftMemory:
        module = read_head(planning.config, "mtp", lambda folder: MTPModule.empty(planning.target, folder))
        return planning.memory_of(module.tensors(), module.spec)

    def drafts(self, wanted: DraftBudget, tokens: list[int]) -> DraftTokens:
        return DraftTokens(tokens[: min(wanted.num_drafts, wanted.depth)])

    def rows_of(self, tokens: torch.Tensor, num_drafts: int) -> ops.DraftRows:
        return ops.DraftRows(tokens[:, :num_drafts])

    def _first_pass(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        return self._module.forward(batch, self._target.final(hidden), self._cache)

    def _levels(self, batch: ForwardBatch, last: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """A chain of each request, [num_requests, num_drafts]."""
        levels = [ops.greedy(self._module.logits(states))]
        for level in range(1, self.num_drafts):
            known = levels[-1].clamp(0, self._num_tokens - 1)  # padding rows may hold any number
            rows = self._after(batch, last, known, level - 1)
            states = self._module.forward(rows, states, self._cache)
            levels.append(ops.greedy(self._module.logits(states)))
        return torch.stack(levels, dim=1)


def _load(context: SpeculatorContext, target: Decoder) -> MTPModule:
    num_positions = context.plan.max_model_len

    def read(folder: Path | None) -> MTPModule:
        return MTPModule.load(target, folder, num_positions)

    return read_head(context.config, "mtp", read)
