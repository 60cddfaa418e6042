"""Steps that are launched and not yet read, and a verification that is launched before it is scheduled. Engine thread.

Verification and the heads after it run on the device, so the next verification can be launched before anything is read,
if it has the same requests with the same numbers of drafts. The scheduler schedules it once the step before is read. If
the scheduled step equals the launched one, except for requests that have ended, the launched step is used. Otherwise it
is dropped: it has written only to slots that its requests do not use yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from operator import add, gt

from slipstream.core.drafts import rows_accepted, tokens_accepted
from slipstream.core.errors import EngineError, SlipstreamError
from slipstream.core.outputs import StepOutput, StepOutputs, TokenLogprobs
from slipstream.core.request import FinishReason, Request, RequestStatus
from slipstream.core.step import ScheduledStep
from slipstream.worker.interface import StepResult


@dataclass(slots=True)
class InFlightStep:
    """A step that is launched and not yet read. draft_methods: heads that draft after it.

    failures: requests that failed, with the error; the others of the step are valid. late: requests whose masks were
    late: their rows are withdrawn, and a later step computes them. indices: the position of each request in the
    launched step, if some requests of that have ended; None: the same positions.
    """

    step_id: int
    step: ScheduledStep
    draft_methods: tuple[str, ...] = ()
    failures: Sequence[tuple[Request, SlipstreamError]] = ()
    late: Sequence[Request] = ()
    indices: Sequence[int] | None = None


@dataclass(slots=True)
class SampledStep:
    """token_ids: aligned with step.requests, empty for those that do not sample. logprobs: by sequence id, per token.

    accepted_rows: by index in step.requests, where drafts were verified: rows of the last token and of accepted drafts.
    num_accepted: instead, of the first requests, which are a run of verifications of chains: how many such rows.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    accepted_rows: dict[int, Sequence[int]] = field(default_factory=dict)
    num_accepted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class AheadStep:
    """A step launched ahead. in_flight: with the previous step's requests, because this one is not scheduled yet.

    num_slots: slots in the blocks of each request at launch. num_preemptions: of each request at launch.
    """

    in_flight: InFlightStep
    num_slots: list[int]
    num_preemptions: list[int]

    @classmethod
    def of(cls, in_flight: InFlightStep) -> AheadStep:
        """A step that is being launched."""
        requests = in_flight.step.requests
        return cls(in_flight, [one.num_slots for one in requests], [one.num_preemptions for one in requests])

    def match(self, step: ScheduledStep) -> InFlightStep | None:
        """The launched step for this scheduled one, or None if they differ."""
        if step.preempted or step.copies or step.layered is not None:
            return None
        launched, requests, indices = self.in_flight.step, step.requests, None
        expected = [launched.num_drafts, launched.num_scheduled_tokens, self.num_slots, self.num_preemptions]
        if requests != launched.requests:  # by identity
            indices = places_in(launched.requests, requests)
            if indices is None:
                return None
            expected = [[values[index] for index in indices] for values in expected]
        num_drafts, num_scheduled, num_slots, num_preemptions = expected
        if step.num_drafts != num_drafts or step.num_scheduled_tokens != num_scheduled:
            return None
        ends = map(add, step.num_computed_tokens, num_scheduled)
        if any(map(gt, ends, num_slots)) or [one.num_preemptions for one in requests] != num_preemptions:
            return None
        ahead = self.in_flight
        return InFlightStep(ahead.step_id, step, ahead.draft_methods, ahead.failures, ahead.late, indices)


def places_in(launched: Sequence[Request], requests: Sequence[Request]) -> list[int] | None:
    """The place of each request among the launched ones; None if one is not there."""
    places = {request.sequence_id: place for place, request in enumerate(launched)}
    found = [places.get(request.sequence_id, -1) for request in requests]
    return None if -1 in found else found


def sampled_step(in_flight: InFlightStep, result: StepResult) -> SampledStep:
    """Assign a result to the step's requests. In a verification, requests that have ended meanwhile get nothing."""
    step, drawn = in_flight.step, result.token_ids
    if result.accepted is None:
        if len(drawn) == len(step.requests):
            return SampledStep([[token_id] for token_id in drawn], result.logprobs)
        rest = iter(drawn)
        return SampledStep([[next(rest)] if samples else [] for samples in step.samples], result.logprobs)
    sampled, rows = SampledStep([]), step.verified
    if rows is not None and rows.is_whole and rows.run.speculation.may_run_ahead and not result.logprobs:
        sampled = _verified_run(in_flight, len(rows.requests), drawn, result.accepted)
    if len(sampled.token_ids) < len(step.requests):
        _add_verified(sampled, in_flight, result, result.accepted)
    return sampled


def _verified_run(in_flight: InFlightStep, num_requests: int, drawn: list[int], accepted: Sequence[int]) -> SampledStep:
    """The first requests, whose chains are verified exactly: an accepted draft is the token drawn before it."""
    step, num_drafts = in_flight.step, in_flight.step.num_drafts[:num_requests]
    firsts: Iterable[int] = accumulate(step.num_scheduled_tokens, initial=0)
    if in_flight.indices is not None:
        firsts = (index * (1 + drafted) for index, drafted in zip(in_flight.indices, num_drafts))
        accepted = [accepted[index] for index in in_flight.indices]
    num_accepted = list(map(len, map(rows_accepted, accepted, num_drafts)))
    new = [drawn[first : first + count] for first, count in zip(firsts, num_accepted)]
    return SampledStep(new, num_accepted=num_accepted)


def _add_verified(sampled: SampledStep, in_flight: InFlightStep, result: StepResult, accepted: Sequence[int]) -> None:
    """Add the requests that are not in `sampled` yet."""
    step, drawn, indices, finished = in_flight.step, result.token_ids, in_flight.indices, RequestStatus.FINISHED
    add_tokens, accepted_rows, logprobs = sampled.token_ids.append, sampled.accepted_rows, result.logprobs
    start = len(sampled.token_ids)
    first = sum(step.num_scheduled_tokens[:start])
    rows = islice(zip(step.requests, step.samples, step.num_drafts), start, None)
    for index, (request, samples, num_drafts) in enumerate(rows, start):
        if not samples:
            add_tokens([])
            continue
        launched = index
        if indices is not None:
            launched = indices[index]
            first = launched * (1 + num_drafts)  # in a step launched ahead all requests have the same number of drafts
        if request.status is finished:
            add_tokens([])
        else:
            held = rows_accepted(accepted[launched], num_drafts)
            add_tokens(tokens_accepted(held, request.draft_token_ids, drawn[first + held[-1]]))
            if num_drafts:
                accepted_rows[index] = held
            if logprobs and (entries := logprobs.get(request.sequence_id)):
                sampled.logprobs[request.sequence_id] = [entries[row] for row in held]
        first += 1 + num_drafts


def alike_verifications(step: ScheduledStep, sampled: SampledStep) -> dict[tuple[str, int, Sequence[int]], int]:
    """How many verifications of a committed step have the same method, number of drafts and accepted rows: most have
    them in common, so that the planner hears of few."""
    counts: dict[tuple[str, int, Sequence[int]], int] = {}
    requests, num_drafts = step.requests, step.num_drafts
    if sampled.num_accepted and step.verified is not None:
        method, alike = step.verified.run.speculation.method, step.verified.alike
        for (drafted, held), count in (alike or Counter(zip(num_drafts, sampled.num_accepted))).items():
            if drafted:
                counts[method, drafted, tuple(range(held))] = count
    for index, rows in sampled.accepted_rows.items():
        speculation = requests[index].speculation
        if speculation is not None:
            key = speculation.method, num_drafts[index], rows
            counts[key] = counts.get(key, 0) + 1
    return counts


def failures_of(in_flight: InFlightStep, result: StepResult) -> list[tuple[Request, SlipstreamError]]:
    """Requests that fail, with the error: in their grammars, or in a logits processor."""
    failed = result.processors.failures if result.processors is not None else {}
    by_processor = [
        (request, EngineError(failed[request.sequence_id]))
        for request in (in_flight.step.requests if failed else ())
        if request.sequence_id in failed and not request.is_finished
    ]
    return [*in_flight.failures, *by_processor]


def add_logprobs(committed: StepOutputs, sampled: SampledStep, result: StepResult) -> None:
    """Give the outputs of a step what was asked beside its tokens: log probabilities and logits."""
    if not (sampled.logprobs or result.prompt_logprobs):
        return
    for output in committed:
        request = output.request
        output.prompt_logprobs = result.prompt_logprobs.get(request.sequence_id)
        output.context_logits = result.context_logits.get(request.sequence_id)
        entries = sampled.logprobs.get(request.sequence_id)
        if entries is not None:
            output.logprobs = entries[: len(output.new_token_ids)]  # a stop may have truncated the step's tokens
            request.cumulative_logprob += sum(entry.logprob for entry in output.logprobs)


def end_all(requests: Iterable[Request], error: EngineError, outputs: StepOutputs) -> StepOutputs:
    """End each request that `outputs` does not end yet with the error, without the scheduler. Returns the outputs and
    the errors; a step of a beam search is no answer."""
    searching = [output.request for output in outputs if output.request.search is not None]
    outputs = StepOutputs(output for output in outputs if output.request.search is None)
    answered = {id(output.request) for output in outputs if output.finish_reason is not None}
    text = str(error)
    for request in (*requests, *searching):
        if id(request) not in answered:
            answered.add(id(request))
            request.status, request.finish_reason, request.error = RequestStatus.FINISHED, FinishReason.ERROR, text
            outputs.append(StepOutput(request, [], FinishReason.ERROR, error=text, fault=type(error)))
    return outputs
