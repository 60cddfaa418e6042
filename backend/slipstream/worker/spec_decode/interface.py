"""Where drafts come from: proposers, which read the text, and heads, which read the model's hidden states.

Engine thread. A proposer answers once a step has been read, with a chain or a tree for each request. A head drafts on
the device right behind the step, from what was just accepted, so that the host reads step and drafts without the device
standing still between them; the engine gets its output once it has committed the step. Neither decides what is
accepted, so both may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from slipstream_kernels import ops

from slipstream.core.config import EngineConfig
from slipstream.core.draft_methods import DRAFT_METHODS
from slipstream.core.errors import ConfigError
from slipstream.core.registry import Registry
from slipstream.core.sampling_params import SamplingParams
from slipstream.nn.checkpoint_path import resolve_checkpoint, resolve_head
from slipstream.nn.decoder import Decoder
from slipstream.worker.draft_memory import DraftMemory, Planning
from slipstream.worker.input_batch import BlockTables
from slipstream.worker.launched_step import ComputedRows
from slipstream.worker.memory_plan import Hardware, MemoryPlan
from slipstream.worker.request_state import RequestState

T = TypeVar("T")


@dataclass(frozen=True)
class DraftRequest:
    """A request that may draft now, as DraftBudget has it."""

    request: RequestState
    num_drafts: int
    depth: int
    place: int
    has_scratch: bool


@dataclass(frozen=True)
class DraftOutput:
    """token_ids and parents as core/drafts.py has them. probs: what each was drawn from, [n, vocab], if it was."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: torch.Tensor | None = None


@dataclass(frozen=True)
class SpeculatorContext:
    """What a drafter is built from. target: the model that it drafts for. tables: the model's block tables, which also
    address the drafter's cache."""

    config: EngineConfig
    hardware: Hardware
    plan: MemoryPlan
    target: Decoder
    tables: BlockTables


class Drafter(Protocol):
    """num_drafts: per step, unless a request asks for another number. num_scratch_slots: cache slots past a request's
    tokens that drafting writes, and that the engine must have found blocks for. drafts_trees: whether some drafts are
    trees.
    """

    drafts_trees: bool
    num_drafts: int
    num_scratch_slots: int

    def forget(self, sequence_ids: Sequence[int]) -> None:
        """These have ended: drop what was kept for them."""
        ...


@runtime_checkable
class Proposer(Drafter, Protocol):
    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftOutput]:
        """One output per request, perhaps empty."""
        ...

    def seconds(self) -> dict[int, float]:
        """What drafting takes on the device, by number of requests, as far as that was measured."""
        ...


@dataclass(frozen=True)
class NoteResult:
    """can_draft: drafts after these tokens are worth something. is_lost: the head's cache has a gap for good."""

    can_draft: bool
    is_lost: bool = False


@runtime_checkable
class DraftHead(Drafter, Protocol):
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
        """Draft tokens of each request, [R, …]: after rows.last. Good until the next call."""
        ...

    def follow(self, rows: ComputedRows) -> None:
        """What `draft` does to the cache, without drafting."""
        ...

    def note(self, request: RequestState, start: int, count: int, is_followed: bool) -> NoteResult:
        """A step computed tokens start to start + count of a running request, with or without this head behind it."""
        ...

    def drafts(self, wanted: DraftRequest, tokens: list[Any]) -> DraftOutput:
        """What a request gets of the tokens that `draft` made for it."""
        ...

    def rows_of(self, tokens: torch.Tensor, num_drafts: int) -> ops.DraftRows:
        """The same for all requests, as long as nothing but their number cuts them, on the device."""
        ...


class DrafterType(Protocol):
    """The class of a drafter, as it stands in the registry."""

    def __call__(self, context: SpeculatorContext) -> Proposer | DraftHead: ...

    def refusal(self, params: SamplingParams) -> str | None:
        """Why a request of such parameters cannot draft this way, or None."""
        ...

    def planned(self, planning: Planning) -> DraftMemory:
        """What it will hold. Raises ConfigError for files that cannot be read."""
        ...


PROPOSERS: Registry[DrafterType] = Registry("speculative_method")


def read_head(config: EngineConfig, method: str, read: Callable[[Path | None], T]) -> T:
    """What `read` makes of the folder that the method's parameter names, or of None: a head of dummy weights.

    Without one, the method may be in the model's own checkpoint. Raises ConfigError where there is no head.
    """
    described = DRAFT_METHODS.get(method)
    folder = config.speculation.checkpoint_of(described)
    if folder:
        return read(resolve_head(described.checkpoint, folder))
    if config.model.load_format == "dummy":
        return read(None)
    if not described.is_in_model:
        raise described.missing()
    try:
        return read(resolve_checkpoint(config.model.model))
    except ConfigError:
        raise described.missing() from None
