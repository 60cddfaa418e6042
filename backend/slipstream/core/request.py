"""The engine's state of one sequence. Owned by the engine thread; other threads read only ids and parameters.

A client request with n > 1 becomes n Requests (same handle, sequence_index 0..n-1) that share prompt blocks.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.core.adapters import NO_SLOT, Adapter, Matrix, SentAdapter
from slipstream.core.prompt_table import PromptRows
from slipstream.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.core.finish import StopConditions
    from slipstream.core.speculation import Speculation

_ids = itertools.count(1)


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(str, enum.Enum):
    """Values are visible to clients (the names of vLLM and OpenAI)."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(slots=True)
class RequestTimes:
    """CLOCK_REALTIME nanoseconds; 0 = not yet."""

    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Invariant between steps: 0 <= num_computed_tokens < num_tokens + num_output_placeholders, because
    the last sampled token has no KV yet. Tokens count as computed once scheduled, and as pending until `commit`.

    priority: lower runs first (as in vLLM), adjusted by age (core/queue_order.py). deadline: time.monotonic() s.
    seed: drawn at admission if the client gave none. prefix_key: all inputs to the KV besides the tokens (adapter,
    image, tenant); requests with different keys never share cached blocks.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int = 0
    priority: int = 0
    deadline: float | None = None
    handle: int = 0
    request_id: str = ""
    sequence_index: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    prefix_key: bytes = b""
    adapter_name: str = ""  # as the client says it
    sent_adapter: SentAdapter | None = None  # or as it sends it
    adapter: Adapter | None = None  # found by Engine.submit
    adapter_slot: int = NO_SLOT  # while it runs
    prompt_table: Matrix | None = (
        None  # as a client sends it, prompt_table_size rows of it; see engine/prompt_tables.py
    )
    prompt_table_size: int = 0
    prompt_rows: PromptRows | None = None  # what Engine.submit makes of it
    num_echo_bytes: int = 0  # of the text that its answer begins with
    num_logprob_bytes: int = 0  # of what one response gathers, core/request_memory.py
    num_prompt_logprob_bytes: int = 0  # likewise
    num_bytes: int = 0  # of host memory until it is answered, core/request_memory.py; of all its sequences together
    sequence_id: int = field(default_factory=lambda: next(_ids))
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str = ""
    token_ids: list[int] = field(default_factory=list)  # prompt + output
    speculation: Speculation | None = None  # None: do not draft; set at submission
    draft_token_ids: list[int] = field(default_factory=list)
    draft_parents: list[int] = field(default_factory=list)  # core/drafts.py; none: a chain
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0  # sampled, or about to be, by steps that are not committed yet
    ahead_limit: int = 0  # with fewer tokens it may be scheduled while some are pending; set by Scheduler.add
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)  # a block of each full KV group per block of the sequence
    window_block_ids: list[int] = field(default_factory=list)  # likewise of windowed groups, core/window_blocks.py
    first_window_block: int = 0  # the first block of the sequence that windowed groups hold
    num_slots: int = 0  # tokens that fit into the blocks of every group
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks of token_ids, grown by the KV cache
    guessed_blocks: list[int] = field(default_factory=list)  # that may still hold its prefix: it or its parent had them
    num_published_blocks: int = 0  # leading blocks that are in the prefix cache
    awaited_hash: bytes = b""  # of the last block that another request was computing for both, KVCacheManager
    num_sent_blocks: int = -1  # of block_ids, that the worker knows; -1: it does not know the request (any more)
    num_sent_window_blocks: int = 0
    num_new_blocks: int = 0  # allocated over the request's life
    num_reused_blocks: int = 0
    cumulative_logprob: float = 0.0
    sort_key: tuple[float, ...] = (0.0, 0)  # the scheduler's order, core/queue_order.py
    queue_deadline: float | None = None  # time.monotonic() by which its first step must be scheduled
    stop_conditions: StopConditions = None  # type: ignore[assignment]  # derived from params by Scheduler.add
    grammar_state: Any = None  # owned by engine/grammar_host.py
    search: Any = None  # the BeamSearch that this request of one token is a step of, engine/beam_search.py
    last_load: int = 0  # the number of the last block of its prefix that comes from host memory, core/host_loads.py
    awaits_loads: bool = False  # not scheduled until then
    is_held: bool = False  # not scheduled while its grammar is being compiled or matched
    times: RequestTimes = field(default_factory=RequestTimes)

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    def drop_drafts(self) -> None:
        self.draft_token_ids, self.draft_parents = [], []

    def note_preempted(self) -> None:
        """It has lost its blocks. Drafts that a step in flight verifies stay until that is committed."""
        self.status = RequestStatus.PREEMPTED
        self.num_computed_tokens = 0
        self.num_sent_blocks = -1
        self.num_preemptions += 1
        if not self.num_output_placeholders:
            self.drop_drafts()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_drawn_tokens(self) -> int:
        """Output tokens, pending ones included."""
        return len(self.token_ids) - len(self.prompt_token_ids) + self.num_output_placeholders

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def is_blocked(self) -> bool:
        """Whether it cannot be admitted now: it is held, or was preempted while a step in flight samples for it."""
        return self.is_held or self.num_output_placeholders > 0

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def max_num_tokens(self) -> int:
        """Prompt tokens plus max_tokens."""
        return len(self.prompt_token_ids) + self.params.max_tokens
