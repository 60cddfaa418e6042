"""The proposers that are loaded, and who asks which of them for what. Engine thread, but `resolve`: any thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.core.config import NO_SPECULATION, EngineConfig
from slipstream.core.drafts import MAX_DRAFT_TOKENS
from slipstream.core.errors import RequestError
from slipstream.core.request import Request, RequestStatus
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.scheduler import Scheduler
from slipstream.core.speculation import DraftPlanner, Speculation
from slipstream.core.step import ScheduledRequest
from slipstream.nn.quant import choose_methods
from slipstream.nn.spec import DecoderSpec
from slipstream.runtime.memory_plan import Hardware
from slipstream.runtime.speculation.proposer import PROPOSERS, Drafts, StepResult, Surroundings, Wish


class Speculator:
    """One per engine. With no method loaded no request speculates."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._config = surroundings.config.speculation
        names = self._config.loaded if surroundings.target is not None else ()  # nothing to verify without a model
        self._types = {name: PROPOSERS.get(name) for name in names}
        self._proposers = {name: build(surroundings) for name, build in self._types.items()}

    @property
    def is_empty(self) -> bool:
        return not self._proposers

    @property
    def num_drafts(self) -> int:
        """The most drafts of a request that asks for no number."""
        return min(max((proposer.num_drafts for proposer in self._proposers.values()), default=0), MAX_DRAFT_TOKENS)

    @property
    def has_trees(self) -> bool:
        return any(proposer.drafts_trees for proposer in self._proposers.values())

    @property
    def keeps_up(self) -> bool:
        """Whether a proposer must hear of every step: it has a cache of its own."""
        return any(proposer.num_scratch_slots for proposer in self._proposers.values())

    def resolve(self, params: SamplingParams) -> Speculation | None:
        """How a request speculates. Raises RequestError for a method that is not loaded or cannot serve it."""
        if not self._proposers or params.num_draft_tokens == 0 or params.speculative_method == NO_SPECULATION:
            self._check_off(params)
            return None
        method = params.speculative_method or self._config.loaded[0]
        if method not in self._proposers:
            raise RequestError("speculative_method", f"got {method!r}, loaded: {', '.join(self._proposers)}")
        refusal = self._types[method].refusal(params)
        if refusal is not None:
            raise RequestError("speculative_method", f"{method} cannot serve this request: {refusal}")
        limit = self._config.num_draft_tokens or MAX_DRAFT_TOKENS
        asked = params.num_draft_tokens
        if asked is not None and asked > limit:
            raise RequestError("num_draft_tokens", f"got {asked}, accepted: 0 (no drafts) to {limit}")
        acceptance = params.speculative_acceptance or self._config.acceptance
        if params.logprobs is not None and acceptance not in ("exact", "rejection"):
            acceptance = "exact"  # log-probabilities are those of tokens drawn
        return Speculation(method, min(asked or self._proposers[method].num_drafts, MAX_DRAFT_TOKENS), acceptance)

    def propose(self, rows: Sequence[ScheduledRequest], result: StepResult, scheduler: Scheduler) -> None:
        """Give the requests of a step that has been committed their next drafts."""
        for method, proposer in self._proposers.items():
            wishes = [
                wish
                for place, row in enumerate(rows)
                if (wish := _wish(row, place, method, scheduler, proposer.num_scratch_slots)) is not None
            ]
            for wish, drafts in zip(wishes, proposer.propose(result, wishes), strict=True):
                _give(wish, drafts)

    def forget(self, requests: Sequence[Request]) -> None:
        for proposer in self._proposers.values():
            proposer.forget(requests)

    def _check_off(self, params: SamplingParams) -> None:
        """A request may name a method on a server that has none only to be told so."""
        if not self._proposers and params.speculative_method not in (None, NO_SPECULATION):
            raise RequestError("speculative_method", f"got {params.speculative_method!r}, loaded: none")


def _wish(row: ScheduledRequest, place: int, method: str, scheduler: Scheduler, num_scratch_slots: int) -> Wish | None:
    """What a request may draft after this row; its blocks are grown for that, as far as there are any."""
    request = row.request
    speculation = request.speculation
    if speculation is None or speculation.method != method or not row.samples:
        return None
    if request.status is not RequestStatus.RUNNING or request.num_computed_tokens != request.num_tokens - 1:
        return None
    num_left = request.stop_conditions.max_len - request.num_tokens - 1
    num_drafts = min(scheduler.planner.num_drafts(request), num_left)
    if num_drafts <= 0:
        return None
    num_slots, num_most = request.num_tokens + num_scratch_slots, scheduler.most_slots(request)
    if num_scratch_slots and not scheduler.cache.allocate(request, min(num_slots, num_most)):
        return None
    return Wish(request, num_drafts, num_left, place, num_slots <= num_most)


def _give(wish: Wish, drafts: Drafts) -> None:
    assert len(drafts.token_ids) <= wish.num_drafts, "more drafts than wished for"
    request = wish.request
    request.draft_token_ids, request.draft_parents = list(drafts.token_ids), list(drafts.parents)
    request.draft_probs = drafts.probs


# Rows of a decode step that cost about as much as one: peak FLOP/s * bytes per weight / (2 * bytes per second) of one
# H200, by the layers' quantization. docs/speculation.md.
FREE_TOKENS = {
    "none": 184,
    "fp8": 186,
    "block_wise_fp8": 186,
    "w8a8_int8": 186,
    "wint8": 92,
    "wint4": 48,
    "w4a8_fp8": 97,
    "a8w8_fp8_wint4": 97,
}
_FREE_TOKENS_OF_FLOAT32 = 28  # its products do not run on tensor cores


def make_planner(config: EngineConfig, spec: DecoderSpec, hardware: Hardware) -> DraftPlanner:
    """A CPU has no rows for free, and none are held back there: it is for development."""
    if config.speculation.throttle == "off":
        return DraftPlanner()
    free_tokens = config.speculation.free_tokens
    if free_tokens == 0 and hardware.device.type == "cuda":
        free_tokens = _free_tokens(config, spec, hardware)
    return DraftPlanner(max(0, free_tokens), is_adaptive=True)


def _free_tokens(config: EngineConfig, spec: DecoderSpec, hardware: Hardware) -> int:
    if hardware.dtype == torch.float32:
        return _FREE_TOKENS_OF_FLOAT32
    return FREE_TOKENS[choose_methods(config.model, spec).name]
