"""Where drafts come from: proposers, which know what is said, and heads, which read the model's hidden states.

Engine thread. A proposer answers once a step has been committed, with a chain or a tree for each request. A head drafts
on the device right behind the step, from what was just accepted, so that the host reads step and drafts without the
device standing still between them; its guesses become drafts once the step has been committed. Neither decides what is
accepted, so both may be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from slipstream_kernels import ops

from slipstream.core.config import EngineConfig
from slipstream.core.registry import Registry
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.nn.decoder import Decoder
from slipstream.worker.computed_rows import ComputedRows
from slipstream.worker.memory_plan import Hardware, MemoryPlan
from slipstream.worker.spec_decode.draft_memory import DraftMemory, Planning


@dataclass(frozen=True)
class Wish:
    """A request that may draft now: all its tokens but the last are computed. num_drafts: most; depth: most levels.

    place: of the request in its step. has_scratch: there are blocks for all of num_scratch_slots; if not, for those up
    to the request's longest length.
    """

    request: Request
    num_drafts: int
    depth: int
    place: int
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


class Drafter(Protocol):
    """num_drafts: per step, where nobody says. num_scratch_slots: cache slots past a request's tokens that drafting
    writes, and that the engine must have found blocks for. drafts_trees: whether some drafts are trees.
    """

    drafts_trees: bool
    num_drafts: int
    num_scratch_slots: int

    def forget(self, requests: Sequence[Request]) -> None:
        """These have ended: drop what was kept for them."""
        ...


@runtime_checkable
class Proposer(Drafter, Protocol):
    def propose(self, wishes: Sequence[Wish]) -> list[Drafts]:
        """One answer per wish, perhaps empty."""
        ...

    def seconds(self) -> dict[int, float]:
        """What drafting takes on the device, by number of requests, as far as that was measured."""
        ...


@runtime_checkable
class Head(Drafter, Protocol):
    """reads_all_rows: of every prompt, and of every step of a request that drafts, it reads the hidden states of all
    tokens, which its own cache follows; if not, of each request's last token alone.

    num_levels: the deepest draft.
    """

    reads_all_rows: bool
    num_levels: int

    def capture(self, rows: Sequence[ComputedRows]) -> dict[int, float]:
        """Make CUDA graphs of drafting behind these; once, before the first step.

        Returns the seconds that drafting takes by number of requests, as far as there are graphs."""
        ...

    def draft(self, rows: ComputedRows) -> torch.Tensor:
        """Guesses of each request, [R, …]: after rows.last. Good until the next call."""
        ...

    def follow(self, rows: ComputedRows) -> None:
        """What `draft` does to the cache, without the guesses."""
        ...

    def note(self, request: Request, start: int, count: int, is_followed: bool) -> bool:
        """A step computed tokens start to start + count of a running request, with or without this head behind it.

        Returns whether guesses after them are worth anything."""
        ...

    def drafts(self, wish: Wish, guesses: list[Any]) -> Drafts:
        """What a request's guesses give it."""
        ...

    def rows_of(self, guesses: torch.Tensor, num_drafts: int) -> ops.DraftRows:
        """The same for all requests, as long as nothing but their number cuts them, on the device."""
        ...


class DrafterType(Protocol):
    """The class of a drafter, as it stands in the registry."""

    def __call__(self, surroundings: Surroundings) -> Proposer | Head: ...

    def refusal(self, params: SamplingParams) -> str | None:
        """Why a request of such parameters cannot draft this way, or None."""
        ...

    def planned(self, planning: Planning) -> DraftMemory:
        """What it will hold. Raises ConfigError for files that cannot be read."""
        ...


PROPOSERS: Registry[DrafterType] = Registry("speculative_method")
