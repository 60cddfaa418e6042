"""The proposers that are loaded, and who asks which of them for what. Engine thread, but `resolve`: any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from slipstream_kernels import ops

from slipstream.core.config import NO_SPECULATION, EngineConfig
from slipstream.core.drafts import MAX_DRAFT_TOKENS
from slipstream.core.errors import RequestError
from slipstream.core.request import Request, RequestStatus
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.scheduler import Scheduler
from slipstream.core.speculation import DraftPlanner, Speculation
from slipstream.core.step import ScheduledRequest, ScheduledStep
from slipstream.core.step_costs import StepCosts
from slipstream.nn.quant import FREE_TOKENS, choose_methods
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.computed_rows import ComputedRows
from slipstream.worker.cuda_graphs import DraftForms, GraphShape
from slipstream.worker.host_copy import HostCopy
from slipstream.worker.memory_plan import Hardware
from slipstream.worker.sample.sampler import draws_by_itself
from slipstream.worker.spec_decode.interface import PROPOSERS, Drafter, Drafts, Head, Proposer, Surroundings, Wish

# For a dozen of verifications launched one ahead of the other.
SPARE_SLOTS = 64
# Beside its device time, of a draft model, which the host starts once it has read a verification and reads before the
# next: about what it took on a host with an H200, for a planner to start from.
HOST_SECONDS, HOST_SECONDS_OF_REQUEST = 1.5e-3, 40e-6


@dataclass(frozen=True)
class Guesses:
    """What heads did behind a step. by_method: guesses of each request of its batch, on their way to the host.
    on_device: the same there. followed: caches brought along. places: as in LaunchedVerification."""

    by_method: dict[str, HostCopy] = field(default_factory=dict)
    on_device: dict[str, torch.Tensor] = field(default_factory=dict)
    followed: set[str] = field(default_factory=set)
    places: Sequence[int] | None = None


class Speculator:
    """One per engine. With no method loaded no request speculates."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._config = surroundings.config.speculation
        self._is_deterministic = surroundings.config.model.deterministic
        names = self._config.loaded if surroundings.target is not None else ()  # nothing to verify without a model
        self._types = {name: PROPOSERS.get(name) for name in names}
        self._drafters = {name: build(surroundings) for name, build in self._types.items()}
        self._proposers = {name: one for name, one in self._drafters.items() if isinstance(one, Proposer)}
        self._heads = {name: one for name, one in self._drafters.items() if isinstance(one, Head)}

    @property
    def is_empty(self) -> bool:
        return not self._drafters

    @property
    def forms(self) -> DraftForms:
        """What drafts look like, of requests that ask for no number."""
        drafters = self._drafters.values()
        return DraftForms(
            num_drafts=min(max((drafter.num_drafts for drafter in drafters), default=0), MAX_DRAFT_TOKENS),
            has_trees=any(drafter.drafts_trees for drafter in drafters),
            are_ragged=bool(self._proposers) or len(self._heads) > 1,
            reads_all_rows=any(head.reads_all_rows for head in self._heads.values()),
        )

    def capture(self, rows: Sequence[ComputedRows]) -> dict[str, dict[int, float]]:
        """Make graphs of what heads do behind verifications; rows: the tensors of each graph of one.

        Returns the seconds that drafting takes, by method and number of requests."""
        seconds = {method: head.capture(rows) for method, head in self._heads.items()}
        return seconds | {method: _with_host(proposer.seconds()) for method, proposer in self._proposers.items()}

    def resolve(self, params: SamplingParams) -> Speculation | None:
        """How a request speculates. Raises RequestError for a method that is not loaded or cannot serve it."""
        if not self._drafters or params.num_draft_tokens == 0 or params.speculative_method == NO_SPECULATION:
            self._check_off(params)
            return None
        method = params.speculative_method or self._config.loaded[0]
        if method not in self._drafters:
            raise RequestError("speculative_method", f"got {method!r}, loaded: {', '.join(self._drafters)}")
        refusal = self._types[method].refusal(params)
        if refusal is not None:
            raise RequestError("speculative_method", f"{method} cannot serve this request: {refusal}")
        limit = self._config.num_draft_tokens or MAX_DRAFT_TOKENS
        asked = params.num_draft_tokens
        if asked is not None and asked > limit:
            raise RequestError("num_draft_tokens", f"got {asked}, accepted: 0 (no drafts) to {limit}")
        acceptance = params.speculative_acceptance or self._config.acceptance
        if self._is_deterministic and acceptance != "exact":
            raise RequestError("speculative_acceptance", f"got {acceptance!r}, accepted here: exact")
        if params.logprobs is not None and acceptance not in ("exact", "rejection"):
            acceptance = "exact"  # log-probabilities are those of tokens drawn
        return Speculation(method, min(asked or self._drafters[method].num_drafts, MAX_DRAFT_TOKENS), acceptance)

    def prepare(self, step: ScheduledStep, scheduler: Scheduler, is_ahead: bool) -> None:
        """Find blocks for what drafting writes behind a step's requests, as far as there are any.

        is_ahead: so that the next verifications may be launched before this step is read, and before block tables are
        copied again. If nobody waits for blocks there are some to spare: else of many requests one would come to the
        end of its blocks at nearly every step."""
        cache, num_spare = scheduler.cache, 0 if scheduler.num_waiting or not is_ahead else SPARE_SLOTS
        for row in step.requests:
            drafter = self._drafter_after(row, scheduler)
            if drafter is not None:
                num_slots = _most_slots_after(row, drafter, 1 + row.num_drafts if is_ahead else 0)
                most = scheduler.most_slots(row.request)
                if not (num_spare and cache.allocate(row.request, min(num_slots + num_spare, most))):
                    cache.allocate(row.request, min(num_slots, most))

    def launch(self, step: ScheduledStep, scheduler: Scheduler, rows: Callable[[], ComputedRows]) -> Guesses:
        """Let heads draft right behind a step. rows: what it computed, asked for only if a head wants it."""
        guesses = Guesses()
        for method, head in self._heads.items():
            if any(self._drafter_after(row, scheduler) is head for row in step.requests):
                guesses.on_device[method] = head.draft(rows())
                guesses.by_method[method] = HostCopy((guesses.on_device[method],), is_urgent=True)
            elif head.reads_all_rows and any(row.num_scheduled_tokens > 1 + row.num_drafts for row in step.requests):
                head.follow(rows())  # prompts always: others may share their blocks, and draft
                guesses.followed.add(method)
        return guesses

    def drafts_behind(self, step: ScheduledStep, guesses: Guesses, scheduler: Scheduler) -> ops.DraftRows | None:
        """What the next step verifies, if that can be told before this one is read: the same requests with as many
        drafts of one head, and nothing in sight that could cut them."""
        first = step.requests[0]
        speculation = first.request.speculation
        head = None if speculation is None else self._heads.get(speculation.method)
        if head is None or speculation is None or speculation.method not in guesses.on_device or not first.num_drafts:
            return None
        for row in step.requests:
            if row.num_drafts != first.num_drafts or not self._goes_on_alike(row, head, scheduler):
                return None
        return head.rows_of(guesses.on_device[speculation.method], first.num_drafts)

    def propose(
        self, step: ScheduledStep, token_ids: Sequence[list[int]], guesses: Guesses, scheduler: Scheduler
    ) -> None:
        """Give the requests of a step that has been committed their next drafts. token_ids: what it brought each."""
        wishes: dict[str, list[Wish]] = {}
        for place, (row, new_token_ids) in enumerate(zip(step.requests, token_ids)):
            count = len(new_token_ids) if row.num_drafts else row.num_scheduled_tokens
            is_sound = self._note(row, count, guesses)
            wish = self._wish(row, place, scheduler)
            if wish is not None:
                assert wish.request.speculation is not None
                method = wish.request.speculation.method
                if method not in self._heads or (is_sound.get(method) and method in guesses.by_method):
                    wishes.setdefault(method, []).append(wish)
        for method, some in wishes.items():
            if method in self._heads:
                (found,) = guesses.by_method[method].lists()
                places = guesses.places or range(len(step.requests))
                answers = [self._heads[method].drafts(wish, found[places[wish.place]]) for wish in some]
            else:
                answers = self._proposers[method].propose(some)
            for wish, drafts in zip(some, answers, strict=True):
                _give(wish, drafts)

    def forget(self, requests: Sequence[Request]) -> None:
        for drafter in self._drafters.values():
            drafter.forget(requests)

    def _note(self, row: ScheduledRequest, count: int, guesses: Guesses) -> dict[str, bool]:
        """Tell the heads what became of a row; by method, whether a head's guesses after it are worth anything."""
        if row.request.status is not RequestStatus.RUNNING:
            return {}
        return {
            method: head.note(
                row.request, row.num_computed_tokens, count, method in guesses.by_method or method in guesses.followed
            )
            for method, head in self._heads.items()
        }

    def _goes_on_alike(self, row: ScheduledRequest, head: Head, scheduler: Scheduler) -> bool:
        """Whether a request will have as many drafts of this head again, judged by the model's own word."""
        request, count = row.request, row.num_drafts
        if self._drafter_after(row, scheduler) is not head or scheduler.planner.num_drafts(request) != count:
            return False
        speculation = request.speculation
        is_exact = request.params.is_greedy or (speculation is not None and speculation.acceptance == "exact")
        if row.num_scheduled_tokens != 1 + count or not is_exact or not draws_by_itself(request):
            return False
        num_left = request.stop_conditions.max_len - request.num_tokens
        num_slots = len(request.block_ids) * scheduler.cache.block_size
        return num_left > 2 * head.num_levels + 2 and num_slots >= _most_slots_after(row, head, 1 + count)

    def _drafter_after(self, row: ScheduledRequest, scheduler: Scheduler) -> Proposer | Head | None:
        """Who may draft for a request after this row, as far as that is known before the row is computed."""
        speculation = row.request.speculation
        if speculation is None or not row.samples or not scheduler.planner.num_drafts(row.request):
            return None
        return self._drafters[speculation.method]

    def _wish(self, row: ScheduledRequest, place: int, scheduler: Scheduler) -> Wish | None:
        """What a request may draft after this row, which has been committed."""
        request, drafter = row.request, self._drafter_after(row, scheduler)
        if drafter is None or request.status is not RequestStatus.RUNNING:
            return None
        if request.num_computed_tokens != request.num_tokens - 1:
            return None
        num_left = request.stop_conditions.max_len - request.num_tokens - 1
        num_drafts = min(scheduler.planner.num_drafts(request), num_left)
        num_slots, num_most = request.num_tokens + drafter.num_scratch_slots, scheduler.most_slots(request)
        if num_drafts <= 0 or len(request.block_ids) * scheduler.cache.block_size < min(num_slots, num_most):
            return None
        return Wish(request, num_drafts, num_left, place, num_slots <= num_most)

    def _check_off(self, params: SamplingParams) -> None:
        """A request may name a method on a server that has none only to be told so."""
        if not self._drafters and params.speculative_method not in (None, NO_SPECULATION):
            raise RequestError("speculative_method", f"got {params.speculative_method!r}, loaded: none")


def _with_host(seconds: Mapping[int, float]) -> dict[int, float]:
    """What a proposer that has work for the device takes while that stands still, by number of requests."""
    return {count: took + HOST_SECONDS + count * HOST_SECONDS_OF_REQUEST for count, took in seconds.items()}


def _most_slots_after(row: ScheduledRequest, drafter: Drafter, num_ahead: int) -> int:
    """That a request may need behind a row: of all drafts, the token after them, num_ahead rows more, and scratch."""
    return row.num_computed_tokens + row.num_scheduled_tokens + 1 + num_ahead + drafter.num_scratch_slots


def _give(wish: Wish, drafts: Drafts) -> None:
    assert len(drafts.token_ids) <= wish.num_drafts, "more drafts than wished for"
    request = wish.request
    request.draft_token_ids, request.draft_parents = list(drafts.token_ids), list(drafts.parents)
    request.draft_probs = drafts.probs


_FREE_TOKENS_OF_FLOAT32 = 28  # its products do not run on tensor cores


def make_planner(
    config: EngineConfig,
    spec: DecoderSpec,
    hardware: Hardware,
    step_seconds: Mapping[GraphShape, float] | None = None,
    draft_seconds: Mapping[str, Mapping[int, float]] | None = None,
) -> DraftPlanner:
    """step_seconds, draft_seconds: what was measured at start, by which rows are worth it or not. Where nothing was,
    free rows are known by how the weights are held. A CPU has none, and none are held back there: it is for
    development."""
    if config.speculation.throttle == "off":
        return DraftPlanner()
    costs = _costs(step_seconds, draft_seconds or {}) if step_seconds else None
    free_tokens = config.speculation.free_tokens
    if free_tokens == 0 and costs is None and hardware.device.type == "cuda":
        free_tokens = _free_tokens(config, spec, hardware)
    return DraftPlanner(max(0, free_tokens), is_adaptive=True, costs=costs)


def _costs(step_seconds: Mapping[GraphShape, float], draft_seconds: Mapping[str, Mapping[int, float]]) -> StepCosts:
    plain: dict[int, float] = {}
    verified: list[tuple[int, int, int, float]] = []
    for shape, seconds in step_seconds.items():
        if shape.max_query_len == 1:
            plain[shape.num_requests] = seconds
        else:
            verified.append((shape.num_tokens, shape.num_requests, shape.max_query_len, seconds))
    drafting = {method: tuple(sorted(seconds.items())) for method, seconds in draft_seconds.items()}
    return StepCosts(tuple(sorted(plain.items())), tuple(sorted(verified)), drafting)


def _free_tokens(config: EngineConfig, spec: DecoderSpec, hardware: Hardware) -> int:
    if hardware.dtype == torch.float32:
        return _FREE_TOKENS_OF_FLOAT32
    return FREE_TOKENS[choose_methods(config.model, spec).name]
