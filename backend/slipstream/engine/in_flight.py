"""Steps that have been launched and not read, and one that was launched before it could be scheduled. Engine thread.

A verification decides how far its requests get, and heads draft behind it, all on the device: so the next verification
can be launched before anything is read, as long as it has the same requests with as many drafts. The scheduler is asked
for that step once the one before it has been read. If it says what was launched, less the requests that have ended, it
is taken up; if not, it is dropped: it has written only behind what its requests hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from slipstream.core.step import ScheduledStep
from slipstream.worker.spec_decode.speculator import Guesses
from slipstream.worker.step_input import StepInput
from slipstream.worker.step_sample import LaunchedVerification, PendingSample


@dataclass(frozen=True)
class Flight:
    """A step that has been launched and not read."""

    step: ScheduledStep
    inputs: StepInput | None
    sample: PendingSample
    guesses: Guesses


@dataclass(frozen=True)
class FlightAhead:
    """flight: whose step stands for the one that is not scheduled yet. num_slots: that each request had blocks for."""

    flight: Flight
    num_slots: list[int]
    num_preemptions: list[int]

    def take_up(self, step: ScheduledStep) -> Flight | None:
        """As the step that was scheduled by now, or None if this is another."""
        if step.preempted or step.copies:
            return None
        expected = {row.request.request_id: place for place, row in enumerate(self.flight.step.requests)}
        places = []
        for row in step.requests:
            place = expected.get(row.request.request_id, -1)
            if place < 0 or row.request.num_preemptions != self.num_preemptions[place]:
                return None
            like = self.flight.step.requests[place]
            is_same = row.num_drafts == like.num_drafts and row.num_scheduled_tokens == like.num_scheduled_tokens
            if not is_same or row.num_computed_tokens + row.num_scheduled_tokens > self.num_slots[place]:
                return None
            places.append(place)
        sample, guesses = self.flight.sample, self.flight.guesses
        assert isinstance(sample, LaunchedVerification)
        some = places if len(places) < len(expected) else None
        sample, guesses = replace(sample, step=step, places=some), replace(guesses, places=some)
        return Flight(step, self.flight.inputs, sample, guesses)
