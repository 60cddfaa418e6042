"""Proposer: where drafts come from. Engine thread.

After each step that is not run ahead of, the engine hands over what was computed and which requests may draft; the
proposer answers with a chain or a tree for each. A proposer never decides what is accepted, so it may be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from slipstream.core.config import EngineConfig
from slipstream.core.registry import Registry
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.nn.decoder import Decoder
from slipstream.runtime.memory_plan import Hardware, MemoryPlan


@dataclass(frozen=True)
class ComputedTokens:
    """Tokens of one request that a step computed for good. rows: theirs among the step's hidden states, in order.

    start: position of the first.
    """

    request: Request
    start: int
    rows: list[int]


@dataclass(frozen=True)
class StepResult:
    """hidden: [T, width of Decoder.forward], None if a later step has run over them. computed: in the step's order."""

    hidden: torch.Tensor | None
    computed: list[ComputedTokens]


@dataclass(frozen=True)
class Wish:
    """A request that may draft now: all its tokens but the last are computed. num_drafts: most; depth: most levels.

    computed: its place in StepResult.computed. has_scratch: there are blocks for all of num_scratch_slots; if not, for
    those up to the request's longest length.
    """

    request: Request
    num_drafts: int
    depth: int
    computed: int
    has_scratch: bool


@dataclass(frozen=True)
class Drafts:
    """token_ids and parents as core/drafts.py has them. probs: what each was drawn from, [n, vocab], if it was."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: torch.Tensor | None = None


@dataclass(frozen=True)
class Surroundings:
    """What a proposer is built from. target: the model that it drafts for; None without one (load_format "null")."""

    config: EngineConfig
    hardware: Hardware
    plan: MemoryPlan
    target: Decoder | None


class Proposer(Protocol):
    """num_drafts: per step, where nobody says. num_scratch_slots: cache slots past a request's tokens that drafting
    writes, and that the engine must have found blocks for. drafts_trees: whether some drafts are trees.
    """

    drafts_trees: bool

    num_drafts: int
    num_scratch_slots: int

    def propose(self, result: StepResult, wishes: Sequence[Wish]) -> list[Drafts]:
        """One answer per wish, perhaps empty; called after every step while any request may draft this way."""
        ...

    def forget(self, requests: Sequence[Request]) -> None:
        """These have ended: drop what was kept for them."""
        ...


class ProposerType(Protocol):
    """The class of a proposer, as it stands in the registry."""

    def __call__(self, surroundings: Surroundings) -> Proposer: ...

    def refusal(self, params: SamplingParams) -> str | None:
        """Why a request of such parameters cannot draft this way, or None."""
        ...


PROPOSERS: Registry[ProposerType] = Registry("speculative_method")
