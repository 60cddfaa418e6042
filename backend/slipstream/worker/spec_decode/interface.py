"""Protocols of speculation methods: proposers, which read the text, and heads, which read the model's hidden states.

Engine thread. A proposer drafts on the host after a step was read: a chain or a tree per request. A head drafts on the
device directly after the step, from the tokens just accepted, so that the device does not wait for the host; the engine
gets its drafts after it has committed the step. The verifier alone accepts drafts, so a drafter may be wrong.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from slipstream.worker.block_tables import BlockTables
from slipstream.worker.hardware import Hardware
from slipstream.worker.interface import DraftBudget, DraftTokens
from slipstream.worker.launched_step import ComputedRows
from slipstream.worker.memory_plan import MemoryPlan
from slipstream.worker.request_state import RequestState
from slipstream.worker.spec_decode.planning import DraftMemory, Planning

T = TypeVar("T")


@dataclass(slots=True)
class DraftRequest:
    """A request that may draft now, with what the engine allows it."""

    request: RequestState
    budget: DraftBudget


@dataclass(slots=True)
class DraftOutput(DraftTokens):
    """probs: the distributions of drawn drafts, [n, vocab]; else None. is_behind: no drafts yet, because the drafter
    still computes the request's tokens."""

    probs: torch.Tensor | None = None
    is_behind: bool = False


@dataclass(frozen=True)
class SpeculatorContext:
    """Arguments of a drafter's constructor. target: the model that it drafts for. tables: the block tables of model and
    drafter."""

    config: EngineConfig
    hardware: Hardware
    plan: MemoryPlan
    target: Decoder
    tables: BlockTables


class Drafter(Protocol):
    """num_drafts: default per step and request. num_scratch_slots: cache slots past a request's tokens that drafting
    writes; the engine allocates blocks for them. drafts_trees: whether some drafts are trees.
    """

    drafts_trees: bool
    num_drafts: int
    num_scratch_slots: int

    def forget(self, sequence_ids: Sequence[int]) -> None:
        """Drop the state of ended requests."""
        ...


@runtime_checkable
class Proposer(Drafter, Protocol):
    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftOutput]:
        """One output per request, perhaps empty."""
        ...

    def seconds(self) -> dict[int, float]:
        """Seconds of drafting on the device by number of requests; empty if not measured."""
        ...


@runtime_checkable
class ChainProposer(Proposer, Protocol):
    """Needs nothing of a request but its text, and is never behind it."""

    def chains(self, requests: Sequence[RequestState], num_drafts: int) -> list[list[int]]:
        """At most num_drafts tokens for each request."""
        ...


class DraftReadiness(enum.Enum):
    """READY: the head has read a step's tokens, so it may draft after them. BEHIND: it has not. LOST: its cache has a
    gap that stays, so that the request's own head cannot draft for it any more."""

    READY = "ready"
    BEHIND = "behind"
    LOST = "lost"


@runtime_checkable
class DraftHead(Drafter, Protocol):
    """reads_all_rows: the head has a KV cache of its own, so it reads the hidden states of all tokens of every prompt
    and of every step of a request that drafts. If not, it reads those of each request's last token only.

    num_levels: the deepest draft.
    """

    reads_all_rows: bool
    num_levels: int

    def capture(self, rows: Sequence[ComputedRows]) -> dict[int, float]:
        """Draft after these rows, to compile kernels; capture it as a CUDA graph where they are a graph's. Called once,
        before the first step.

        Returns the seconds that drafting takes, by number of requests; empty without graphs."""
        ...

    def draft(self, rows: ComputedRows) -> torch.Tensor:
        """Draft tokens of each request after rows.last: [R, …]; chains: [R, num_drafts]. Valid until the next call."""
        ...

    def update_kv(self, rows: ComputedRows) -> None:
        """Write the head's KV cache as `draft` does, without drafting."""
        ...

    def after_step(self, request: RequestState, start: int, count: int, is_updated: bool) -> DraftReadiness:
        """Record that a step computed tokens start to start + count of a running request.

        is_updated: this head ran after the step. One without a cache is not told of steps after which it ran."""
        ...

    def drafts(self, wanted: DraftBudget, tokens: list[Any]) -> DraftTokens:
        """The drafts of one request from its row of `draft`, cut to what the request may use."""
        ...

    def rows_of(self, tokens: torch.Tensor, num_drafts: int) -> ops.DraftRows:
        """The rows that the next step verifies, on the device, when all requests have num_drafts drafts."""
        ...


class DrafterType(Protocol):
    """The class of a drafter, as registered."""

    def __call__(self, context: SpeculatorContext) -> Proposer | DraftHead: ...

    def refusal(self, params: SamplingParams) -> str | None:
        """Why a request with these parameters cannot use the method, or None."""
        ...

    def planned(self, planning: Planning) -> DraftMemory:
        """The memory of its weights and cache. Raises ConfigError for files that cannot be read."""
        ...


PROPOSERS: Registry[DrafterType] = Registry("speculative_method")


def read_head(config: EngineConfig, method: str, read: Callable[[Path | None], T]) -> T:
    """Call `read` with the folder of the method's checkpoint, or with None for dummy weights.

    If the parameter is empty and the method allows it, the folder is the model's. Raises ConfigError if there is none.
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
