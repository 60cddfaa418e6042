"""The messages between engine and worker. Plain data only.

The engine owns the `core.request.Request`s and decides. A worker computes, and keeps its own state of each request by
sequence id. Every message can be pickled, so that a worker may be another process. Lists are aligned by request. In one
process messages are passed by reference: neither side changes one after that. Those of every step are not frozen: a
frozen one takes eight times as long to make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.core.adapters import NO_SLOT, Adapter
from slipstream.core.host_cache import BlockCopies
from slipstream.core.outputs import TokenLogprobs
from slipstream.core.prompt_table import PromptRows
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.step_costs import StepCosts
from slipstream.worker.sample.structured_output import GrammarMasks


@dataclass(slots=True)
class NewRequest:
    """Sent before a request's first step, and again after a preemption, which frees its blocks.

    output_token_ids, block_ids, window_block_ids, block_hashes: those so far, as Request has them. early_token_ids: end
    tokens, banned for the first min_tokens. draft_method: "" if it does not speculate. acceptance: how its drafts are
    verified. has_grammar: its rows need masks. adapter_slot: of its adapter, if it has one.
    prompt_rows: embeddings that its client sent. end_token_ids: of one with a grammar, which may end its text by them.
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
    window_block_ids: list[int] = field(default_factory=list)
    adapter_slot: int = NO_SLOT
    prompt_rows: PromptRows | None = None
    end_token_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class Updates:
    """Changes of known requests since the last message, by sequence id.

    output_token_ids: only of requests whose text the worker reads (penalties, bad words, logits processors, proposers).
    block_hashes: only if a speculation method is loaded.
    """

    block_ids: dict[int, list[int]] = field(default_factory=dict)
    output_token_ids: dict[int, list[int]] = field(default_factory=dict)
    block_hashes: dict[int, list[bytes]] = field(default_factory=dict)
    window_block_ids: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AcceptedBranches:
    """What a step that verified draft trees has accepted, for a model in stages.

    rows: by index of a request in the step, the rows that hold, row 0 its last token and row 1 + i draft i; only where
    some of them have to be moved, and of requests that had kept their blocks until the step was read."""

    step_id: int
    rows: Mapping[int, Sequence[int]]


@dataclass(frozen=True, slots=True)
class LayeredInput:
    """Tokens of a prompt, from first_token on, to send through the layers first_layer to end_layer - 1 before a step's
    own rows. They have gone through those before in earlier steps, without other such tokens between."""

    sequence_id: int
    first_token: int
    token_ids: list[int]
    first_layer: int
    end_layer: int


@dataclass(slots=True)
class StepInput:
    """One step. The last num_drafts of a request's num_scheduled_tokens are drafts to verify.

    token_ids: of all rows, request by request. pending: indices of the requests whose single token is sampled by the
    step before; its id is 0 here. draft_parents: of draft trees, by sequence id. copies: of blocks, made before the
    step. draft_methods: heads that draft after this step; kv_update_methods: heads that only update their KV caches.
    waits_for_masks: the step samples only when `Worker.sample` brings the masks. adapters: to be put into slots before.
    accepted: of the tree verifications read since the last message, whose branches are moved before anything else.
    layered: see LayeredInput.
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
    kv_update_methods: tuple[str, ...] = ()
    waits_for_masks: bool = False
    adapters: list[tuple[int, Adapter]] = field(default_factory=list)
    accepted: list[AcceptedBranches] = field(default_factory=list)
    layered: LayeredInput | None = None


@dataclass(slots=True)
class AheadInput:
    """Verify the drafts that the head `method` makes after the step `behind_id`, before that step is read. The requests
    and their numbers of drafts are those of that step."""

    step_id: int
    behind_id: int
    method: str
    draft_methods: tuple[str, ...] = ()
    kv_update_methods: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessorReport:
    """What the logits processors of a step took on the host, in seconds. failures: by sequence id, for its client.
    dead_rows: sampled rows of drafts for which a class raises, for the verification alone."""

    seconds: float
    failures: dict[int, str] = field(default_factory=dict)
    dead_rows: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepResult:
    """The tokens that a step sampled.

    token_ids: one per sampled row: per request that samples, its last token's row and one row per draft.
    accepted: per request a bit mask of accepted rows: bit 0 the last token, bit 1 + i draft i; None without drafts.
    logprobs: by sequence id, one entry per sampled row. prompt_logprobs: by sequence id, one entry per prompt token,
    sent once with the first token, as are context_logits: rows of fp32. processors: if any request asks for one.
    device_s: seconds between the end of the last step before it that sampled and of this one, as the device saw them;
    None: not known.
    """

    token_ids: list[int]
    accepted: list[int] | None = None
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    context_logits: dict[int, list[bytes]] = field(default_factory=dict)
    processors: ProcessorReport | None = None
    device_s: float | None = None


@dataclass(slots=True)
class DraftBudget:
    """A request that may draft now: all its tokens but the last are computed. num_drafts, depth: limits of drafts and
    levels.

    index: of the request in the launched step. has_scratch: there are blocks for all slots that drafting writes; if
    not, only for slots up to the request's maximum length.
    """

    sequence_id: int
    method: str
    num_drafts: int
    depth: int
    index: int
    has_scratch: bool


@dataclass(slots=True)
class AlikeBudgets:
    """The requests of a verification that go on alike: each may have a chain of num_drafts tokens of the same head, if
    the next one is launched already, or of the same proposer. indices: of sequence_ids in the launched step."""

    method: str
    num_drafts: int
    sequence_ids: list[int] = field(default_factory=list)
    indices: Sequence[int] = field(default_factory=list)


@dataclass(slots=True)
class DraftInput:
    """Sent after a step was read. computed: (sequence id, first token, number of tokens) of its running requests, for
    the KV caches of heads. budgets: which requests may draft. alike: others that may, if it is known that they are."""

    step_id: int
    budgets: list[DraftBudget]
    computed: list[tuple[int, int, int]] = field(default_factory=list)
    updates: Updates = field(default_factory=Updates)
    alike: AlikeBudgets | None = None


@dataclass(slots=True)
class DraftTokens:
    """token_ids, parents: see core/drafts.py."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)


@dataclass(slots=True)
class DraftResult:
    """drafts: one entry per budget. lost_ids: sequence ids of requests that can no longer draft. is_behind: a drafter
    has computed tokens of some request that cannot draft yet, which took time. chains: one entry per request of
    DraftInput.alike, empty if the head has none."""

    drafts: list[DraftTokens]
    lost_ids: list[int] = field(default_factory=list)
    is_behind: bool = False
    chains: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """A loaded speculation method.

    num_drafts: default per step and request. num_levels: the deepest draft. num_scratch_slots: cache slots past a
    request's tokens that drafting writes and that need blocks. is_head: it drafts on the device after the step, before
    it is read. reads_all_rows, drafts_trees: see DraftHead. makes_chains: it is a ChainProposer.
    """

    method: str
    num_drafts: int
    num_levels: int
    num_scratch_slots: int
    is_head: bool
    reads_all_rows: bool
    drafts_trees: bool = False
    makes_chains: bool = False

    @property
    def follows_prompts(self) -> bool:
        """Whether it has to be given the rows of prompts, which only whole chunks have."""
        return self.is_head or self.num_scratch_slots > 0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """costs: times of steps and drafting, or None if not measured at start."""

    drafters: tuple[DrafterInfo, ...] = ()
    costs: StepCosts | None = None


class Worker(Protocol):
    """One model on one device. `execute`, `sample` and `execute_ahead` do not wait for the device.

    Steps are read in the order in which they were launched. A step launched ahead that does not match what the
    scheduler orders is never read; it is dropped when a later one is read.
    """

    @property
    def info(self) -> WorkerInfo: ...

    def execute(self, step: StepInput) -> None:
        """Launch a step; unless it waits for masks, also its sampling and the heads after it."""
        ...

    def sample(self, masks: GrammarMasks) -> None:
        """Launch the sampling of the last executed step, which waits for masks."""
        ...

    def execute_ahead(self, ahead: AheadInput) -> None: ...

    def result(self, step_id: int) -> StepResult:
        """Wait for a step, but not for those launched after it."""
        ...

    def draft(self, drafts: DraftInput) -> DraftResult: ...

    def forget(self, sequence_ids: Sequence[int]) -> None:
        """Drop the state of ended requests; unknown ids are ignored."""
        ...

    def prepare(self) -> bool:
        """While nothing is to be done: make one thing ready that a step would else have to make, in some 50 ms. Returns
        whether there may be more."""
        ...

    def sleep(self, level: int) -> None:
        """Give device memory back: KV pool, graphs and drafters; the weights go to host memory (level 1) or nowhere
        (level 2). All requests have been forgotten. Asleep already: the level may rise."""
        ...

    def wake(self, model: str | None) -> None:
        """Be as after the load again. model: the checkpoint from now on, "" for that of the load, which other nodes may
        have elsewhere; None for the last one. If it fails, it sleeps on."""
        ...

    def close(self) -> None:
        """Free weights and KV pool."""
        ...
