"""Steps that have been launched and not read, and one that was launched before it could be scheduled. Engine thread.

A verification accepts drafts and heads draft behind it, all on the device: so the next verification can be launched
before anything is read, if it has the same requests with the same number of drafts. The scheduler schedules that step
once the one before it has been read. If its order matches the launched step, less the requests that have ended, the
launched step is used; if not, it is dropped: it has written only to slots that its requests do not use yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slipstream.core.drafts import verdict
from slipstream.core.errors import SlipstreamError
from slipstream.core.outputs import TokenLogprobs
from slipstream.core.request import Request
from slipstream.core.step import ScheduledStep
from slipstream.worker.interface import StepResult


@dataclass(frozen=True)
class InFlightStep:
    """A step that has been launched and not read. draft_methods: heads that draft behind it.

    failures: requests that went wrong by themselves, with the reason; the others of the step are sound.
    late: requests that this step could not serve, and a later one will: their rows are to be withdrawn.
    places: of the step's requests in the launched one, if some that are in there have ended; None: one after another.
    """

    step_id: int
    step: ScheduledStep
    draft_methods: tuple[str, ...] = ()
    failures: Sequence[tuple[Request, SlipstreamError]] = ()
    late: Sequence[Request] = ()
    places: Sequence[int] | None = None


@dataclass(frozen=True)
class SampledStep:
    """token_ids: aligned with step.requests, empty where nothing was sampled. logprobs: by request id, of each token.

    kept_rows: by place in step.requests, where drafts were verified: the last token's row and those of drafts taken.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    kept_rows: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class AheadStep:
    """in_flight: launched; its step stands for the one that is not scheduled yet.

    num_slots: slots in the blocks of each request at launch. num_preemptions: of each request at launch.
    """

    in_flight: InFlightStep
    num_slots: list[int]
    num_preemptions: list[int]

    def match(self, step: ScheduledStep) -> InFlightStep | None:
        """The launched step for what the scheduler has ordered by now, or None if it ordered another step."""
        if step.preempted or step.copies:
            return None
        launched = self.in_flight.step
        expected = {request.sequence_id: place for place, request in enumerate(launched.requests)}
        places = []
        lists = step.requests, step.num_computed_tokens, step.num_scheduled_tokens, step.num_drafts
        for request, num_computed, num_scheduled, num_drafts in zip(*lists):
            place = expected.get(request.sequence_id, -1)
            if place < 0 or request.num_preemptions != self.num_preemptions[place]:
                return None
            if num_drafts != launched.num_drafts[place] or num_scheduled != launched.num_scheduled_tokens[place]:
                return None
            if num_computed + num_scheduled > self.num_slots[place]:
                return None
            places.append(place)
        return replace(self.in_flight, step=step, places=places if len(places) < len(expected) else None)


def sampled_step(in_flight: InFlightStep, result: StepResult) -> SampledStep:
    """What a result means for each request of the step; those that have ended meanwhile, whose drafts are gone, get
    nothing of a verification."""
    step, drawn = in_flight.step, result.token_ids
    if result.accepted is None:
        if len(drawn) == len(step.requests):
            return SampledStep([[token_id] for token_id in drawn], result.logprobs)
        rest = iter(drawn)
        return SampledStep([[next(rest)] if samples else [] for samples in step.samples], result.logprobs)
    sampled = SampledStep([[] for _ in step.requests])
    first = 0
    for place, request in enumerate(step.requests):
        if not step.samples[place]:
            continue
        num_drafts = step.num_drafts[place]
        launched = place if in_flight.places is None else in_flight.places[place]
        if in_flight.places is not None:
            first = launched * (1 + num_drafts)  # in a step launched ahead all requests have the same number of drafts
        if not request.is_finished:
            drafts = request.draft_token_ids
            found = verdict(result.accepted[launched], drafts, num_drafts, drawn[first : first + 1 + num_drafts])
            sampled.token_ids[place] = found.token_ids
            if num_drafts:
                sampled.kept_rows[place] = found.rows
            if entries := result.logprobs.get(request.sequence_id):
                sampled.logprobs[request.sequence_id] = [entries[row] for row in found.rows]
        first += 1 + num_drafts
    return sampled
