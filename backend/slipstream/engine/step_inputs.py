"""Makes a StepInput of a scheduled step: plain lists, with only what the worker does not know yet. Engine thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, ge

from slipstream.core.finish import end_token_ids
from slipstream.core.layered_prefill import LayeredChunk
from slipstream.core.request import Request, RequestStatus
from slipstream.core.step import ScheduledStep
from slipstream.worker.interface import AcceptedBranches, LayeredInput, NewRequest, StepInput, Updates

_sequence_id: Callable[[Request], int] = attrgetter("sequence_id")


class StepInputs:
    """Tracks what the worker knows of each request.

    proposers: methods that read a request's text. needs_hashes: drafters with caches are loaded, which read hashes.
    has_windows: some KV groups are windowed. has_stages: accepted branches are moved when they are known here.
    """

    def __init__(
        self,
        proposers: Iterable[str] = (),
        needs_hashes: bool = False,
        has_windows: bool = False,
        has_stages: bool = False,
    ) -> None:
        self._proposers = frozenset(proposers)
        self._needs_hashes = needs_hashes
        self._has_windows = has_windows
        self._has_stages = has_stages
        self._tree_steps: set[int] = set()  # ids of those that are not read yet
        self._accepted: list[AcceptedBranches] = []  # since the last message
        self._readers: dict[int, Request] = {}  # requests whose text the worker reads, by id
        self._num_sent_tokens: dict[int, int] = {}  # of these
        self._may_have_tokens = False  # a step was read since they were looked at
        self._num_sent_hashes: dict[int, int] = {}
        self._last_requests: list[Request] = []
        self._last_ids: list[int] = []

    def build(
        self,
        step_id: int,
        step: ScheduledStep,
        draft_methods: tuple[str, ...] = (),
        kv_update_methods: tuple[str, ...] = (),
        waits_for_masks: bool = False,
    ) -> StepInput:
        requests = step.requests
        new_requests: list[NewRequest] = []
        changed = requests if step.run is None else [*step.run.grown, *requests[len(step.run.requests) :]]
        if step.layered is not None:
            changed = [*changed, step.layered.request]
        block_ids = self._new_blocks(changed, new_requests)
        total_num_drafts = sum(step.num_drafts)
        token_ids, pending = _token_ids(step)
        draft_parents = _draft_parents(step) if total_num_drafts and step.verified is None else {}
        accepted, self._accepted = self._accepted, []
        if draft_parents and self._has_stages:
            self._tree_steps.add(step_id)
        return StepInput(
            step_id=step_id,
            sequence_ids=self._sequence_ids(requests),
            num_computed_tokens=step.num_computed_tokens,
            num_scheduled_tokens=step.num_scheduled_tokens,
            num_drafts=step.num_drafts,
            samples=list(step.samples),  # the scheduler may withdraw requests later
            token_ids=token_ids,
            total_num_drafts=total_num_drafts,
            pending=pending,
            new_requests=new_requests,
            updates=Updates(block_ids, self._new_tokens(), window_block_ids=self._new_window_blocks(requests)),
            draft_parents=draft_parents,
            copies=step.copies,
            draft_methods=draft_methods,
            kv_update_methods=kv_update_methods,
            waits_for_masks=waits_for_masks,
            adapters=step.adapters,
            accepted=accepted,
            layered=None if step.layered is None else _layered(step.layered),
        )

    def note_accepted(self, step_id: int, step: ScheduledStep, rows: Mapping[int, Sequence[int]]) -> None:
        """Keep what a step accepted that was read and is not committed yet. rows: SampledStep.accepted_rows."""
        self._may_have_tokens = True
        if step_id not in self._tree_steps:
            return
        self._tree_steps.remove(step_id)
        moved = {
            index: found
            for index, found in rows.items()
            if found[-1] >= len(found)
            and step.requests[index].status is RequestStatus.RUNNING  # else others have its blocks
        }
        self._accepted.append(AcceptedBranches(step_id, moved))

    def updates(self, requests: Sequence[Request]) -> Updates:
        """Changes of known requests since the last message."""
        hashes = {}
        for request in requests if self._needs_hashes else ():
            num_sent = self._num_sent_hashes.get(request.sequence_id, 0)
            if len(request.block_hashes) > num_sent:
                hashes[request.sequence_id] = request.block_hashes[num_sent:]
                self._num_sent_hashes[request.sequence_id] = len(request.block_hashes)
        return Updates(self._new_blocks(requests, []), self._new_tokens(), hashes, self._new_window_blocks(requests))

    def forget(self, sequence_ids: Iterable[int]) -> None:
        self._last_requests = []
        for sequence_id in sequence_ids:
            self._readers.pop(sequence_id, None)
            self._num_sent_tokens.pop(sequence_id, None)
            self._num_sent_hashes.pop(sequence_id, None)

    # ---- parts

    def _sequence_ids(self, requests: list[Request]) -> list[int]:
        """While a step has the requests of the one before, the same list: the worker then knows at a glance."""
        if requests != self._last_requests:  # by identity
            self._last_requests = requests[:]
            self._last_ids = list(map(_sequence_id, requests))
        return self._last_ids

    def _new_blocks(self, requests: Sequence[Request], new_requests: list[NewRequest]) -> dict[int, list[int]]:
        """New blocks of known requests, by sequence id; the others are added to new_requests."""
        changed = [request for request in requests if len(request.block_ids) != request.num_sent_blocks]
        found = {}
        for request in changed:
            if request.num_sent_blocks < 0:
                new_requests.append(self._introduce(request))
            else:
                found[request.sequence_id] = request.block_ids[request.num_sent_blocks :]
            request.num_sent_blocks = len(request.block_ids)
        return found

    def _new_window_blocks(self, requests: Sequence[Request]) -> dict[int, list[int]]:
        """Likewise, after _new_blocks, which has introduced the others."""
        found = {}
        for request in requests if self._has_windows else ():
            num_sent = request.num_sent_window_blocks
            if len(request.window_block_ids) > num_sent:
                found[request.sequence_id] = request.window_block_ids[num_sent:]
                request.num_sent_window_blocks = len(request.window_block_ids)
        return found

    def _introduce(self, request: Request) -> NewRequest:
        params, speculation = request.params, request.speculation
        method = "" if speculation is None else speculation.method
        reads_text = params.has_penalties or params.bad_words_ids or params.logits_processors
        if reads_text or method in self._proposers:
            self._readers[request.sequence_id] = request
            self._num_sent_tokens[request.sequence_id] = request.num_tokens
        if self._needs_hashes:
            self._num_sent_hashes[request.sequence_id] = len(request.block_hashes)
        request.num_sent_window_blocks = len(request.window_block_ids)
        return new_request(request, with_hashes=self._needs_hashes)

    def _new_tokens(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        num_sent_tokens, readers = self._num_sent_tokens, self._readers if self._may_have_tokens else {}
        self._may_have_tokens = False
        for sequence_id, request in readers.items():
            num_tokens, num_sent = len(request.token_ids), num_sent_tokens[sequence_id]
            if num_tokens > num_sent:
                found[sequence_id] = request.token_ids[num_sent:]
                num_sent_tokens[sequence_id] = num_tokens
        return found


def new_request(request: Request, with_hashes: bool = True) -> NewRequest:
    """The NewRequest of a request."""
    params, speculation = request.params, request.speculation
    has_minimum = params.min_tokens > 0 and request.stop_conditions is not None
    return NewRequest(
        sequence_id=request.sequence_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        params=params,
        seed=request.seed,
        block_ids=list(request.block_ids),
        block_hashes=list(request.block_hashes) if with_hashes else [],
        num_preemptions=request.num_preemptions,
        early_token_ids=request.stop_conditions.token_ids if has_minimum else frozenset(),
        draft_method="" if speculation is None else speculation.method,
        acceptance="exact" if speculation is None else speculation.acceptance,
        has_grammar=request.grammar_state is not None,
        window_block_ids=list(request.window_block_ids),
        adapter_slot=request.adapter_slot,
        prompt_rows=request.prompt_rows,
        end_token_ids=end_token_ids(request) if request.grammar_state is not None else frozenset(),
    )


def _layered(chunk: LayeredChunk) -> LayeredInput:
    end = chunk.first_token + chunk.num_tokens
    token_ids = chunk.request.token_ids[chunk.first_token : end]
    return LayeredInput(chunk.request.sequence_id, chunk.first_token, token_ids, chunk.first_layer, chunk.end_layer)


def _token_ids(step: ScheduledStep) -> tuple[list[int], list[int]]:
    """Token ids of all rows, and the indices of requests whose token is not known yet (its id is 0)."""
    starts, counts = step.num_computed_tokens, step.num_scheduled_tokens
    if (verified := step.verified) is not None:
        flat: list[int] = []
        for own, drafts in zip(verified.token_ids, verified.drafts):
            flat.append(own[-1])
            flat += drafts
        behind = len(verified.requests)  # prompts, of which every token is known
        for request, start, count in zip(step.requests[behind:], starts[behind:], counts[behind:]):
            flat += request.token_ids[start : start + count]
        return flat, []
    # what holds for one request of a run holds for all
    if step.run is not None and starts[0] >= len(step.requests[0].token_ids):
        num_decodes = len(step.run.requests)
        token_ids = [0] * num_decodes
        for request, start, count in zip(step.requests[num_decodes:], starts[num_decodes:], counts[num_decodes:]):
            token_ids += request.token_ids[start : start + count]
        return token_ids, list(range(num_decodes))
    if step.total_num_scheduled_tokens == len(counts):  # one token per request
        ends = [len(request.token_ids) for request in step.requests]
        if all(map(ge, starts, ends)):
            return [0] * len(starts), list(range(len(starts)))
        pending = [index for index, (start, end) in enumerate(zip(starts, ends)) if start >= end]
        rows = zip(step.requests, starts, ends)
        return [request.token_ids[start] if start < end else 0 for request, start, end in rows], pending
    token_ids, pending = [], []
    for index, (request, start, count) in enumerate(zip(step.requests, starts, counts)):
        known, end = request.token_ids, start + count
        if start >= len(known):
            pending.append(index)
            token_ids.append(0)
        else:
            token_ids += known[start:end]
            if end > len(known):
                token_ids += request.draft_token_ids[: end - len(known)]
    return token_ids, pending


def _draft_parents(step: ScheduledStep) -> dict[int, list[int]]:
    """Parents of draft trees; a chain has none."""
    return {
        request.sequence_id: request.draft_parents[:num_drafts]
        for request, num_drafts in zip(step.requests, step.num_drafts)
        if num_drafts and request.draft_parents
    }
