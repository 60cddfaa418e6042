"""The border between engine and worker: what a step is told and what comes back. Plain data only.

The engine keeps `core.request.Request`s and decides; a worker keeps what it needs of each request by request id and
computes. Every message here survives pickling, so that a worker may be another process. Lists are aligned by request.
In one process messages are handed over as they are: neither side changes a list after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.core.host_cache import BlockCopies
from slipstream.core.outputs import TokenLogprobs
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.step_costs import StepCosts
from slipstream.worker.sample.structured_output import GrammarMasks


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request before its first step, and again after a preemption, which voids what the worker knew of its blocks.

    output_token_ids, block_ids, block_hashes: those so far. early_token_ids: would end the request, so that none may
    come among its first min_tokens. draft_method: if it may draft; acceptance: how its drafts are verified.
    has_grammar: its rows wait for masks.
    """

    sequence_id: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    params: SamplingParams
    seed: int
    block_ids: list[int]
    block_hashes: list[bytes]
    num_preemptions: int = 0
    early_token_ids: frozenset[int] = frozenset()
    draft_method: str = ""
    acceptance: str = "exact"
    has_grammar: bool = False


@dataclass(frozen=True, slots=True)
class Updates:
    """What requests that the worker knows have got since the last message, by request id.

    output_token_ids: of requests whose text the worker reads (penalties, bad words, proposers). block_hashes: only
    where drafts are made.
    """

    block_ids: dict[int, list[int]] = field(default_factory=dict)
    output_token_ids: dict[int, list[int]] = field(default_factory=dict)
    block_hashes: dict[int, list[bytes]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step. The last num_drafts of a request's num_scheduled_tokens are drafts to verify.

    token_ids: of all rows, request by request. pending: places among the requests whose one token the step before this
    one samples; it stands as 0. draft_parents: of trees of drafts, by request id. copies: to be made before anything
    is computed. draft_methods: heads that draft behind this step; follow_methods: heads that only bring their caches
    along. waits_for_masks: nothing is sampled before `Worker.sample` gives the masks.
    """

    step_id: int
    sequence_ids: list[int]
    num_computed_tokens: list[int]
    num_scheduled_tokens: list[int]
    num_drafts: list[int]
    samples: list[bool]
    token_ids: list[int]
    total_num_drafts: int = 0
    pending: list[int] = field(default_factory=list)
    new_requests: list[NewRequest] = field(default_factory=list)
    updates: Updates = field(default_factory=Updates)
    draft_parents: dict[int, list[int]] = field(default_factory=dict)
    copies: BlockCopies = field(default_factory=BlockCopies)
    draft_methods: tuple[str, ...] = ()
    follow_methods: tuple[str, ...] = ()
    waits_for_masks: bool = False


@dataclass(frozen=True, slots=True)
class AheadInput:
    """Verify what the head `method` drafts behind the step `behind_id`, before anything of that step is read: the same
    requests, with the same number of drafts."""

    step_id: int
    behind_id: int
    method: str
    draft_methods: tuple[str, ...] = ()
    follow_methods: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has sampled.

    token_ids: of every sampled row: one per request that samples, and one per draft of it behind that.
    accepted: by request, which rows hold: bit 0 its last token, bit 1 + i draft i; None without drafts to verify.
    logprobs: by request id, one entry per sampled row, of those that asked. prompt_logprobs: likewise, one entry per
    prompt token; once, with the first token.
    """

    token_ids: list[int]
    accepted: list[int] | None = None
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """A request that may draft now: all its tokens but the last are computed. num_drafts: most; depth: most levels.

    place: of the request in the step as it was launched. has_scratch: there are blocks for all slots that drafting
    writes; if not, for those up to the request's longest length.
    """

    sequence_id: int
    method: str
    num_drafts: int
    depth: int
    place: int
    has_scratch: bool


@dataclass(frozen=True, slots=True)
class DraftInput:
    """After a step was read. computed: (request id, first token, number of tokens) of its requests that go on, for the
    caches of heads. budgets: which requests may draft."""

    step_id: int
    budgets: list[DraftBudget]
    computed: list[tuple[int, int, int]] = field(default_factory=list)
    updates: Updates = field(default_factory=Updates)


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """token_ids and parents as core/drafts.py has them."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DraftResult:
    """drafts: one entry per budget. lost_ids: requests that cannot draft any more."""

    drafts: list[DraftTokens]
    lost_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """A way to draft that the worker has loaded.

    num_drafts: per step, unless a request asks for another number. num_levels: the deepest draft. num_scratch_slots:
    cache slots past a request's tokens that drafting writes, for which there must be blocks. is_head: it drafts on the
    device behind the step, not after it was read. reads_all_rows: as DraftHead has it.
    """

    method: str
    num_drafts: int
    num_levels: int
    num_scratch_slots: int
    is_head: bool
    reads_all_rows: bool


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """costs: what steps and drafting take, if that was measured at start."""

    drafters: tuple[DrafterInfo, ...] = ()
    costs: StepCosts | None = None


class Worker(Protocol):
    """One model on one device. `execute`, `sample` and `execute_ahead` do not wait for the device.

    Steps are read in the order in which they were launched. One that is never read (it was launched ahead of another
    that came) is dropped when a later one is.
    """

    @property
    def info(self) -> WorkerInfo: ...

    def execute(self, step: StepInput) -> None:
        """Launch a step; without waits_for_masks its sampling too, and what heads draft behind it."""
        ...

    def sample(self, masks: GrammarMasks) -> None:
        """The rest of the step that was executed last and waits for masks."""
        ...

    def execute_ahead(self, ahead: AheadInput) -> None: ...

    def result(self, step_id: int) -> StepResult:
        """Wait for a step, not for those launched since."""
        ...

    def draft(self, drafts: DraftInput) -> DraftResult: ...

    def forget(self, sequence_ids: Sequence[int]) -> None:
        """These have ended: drop what is kept for them. Ids that the worker does not know are no error."""
        ...

    def close(self) -> None:
        """Let go of weights and KV pool."""
        ...
