"""Structured output in the engine: who is held back while a grammar is worked on, and the masks that a step needs.

Engine thread. The masks come from another process (grammar_host.py); a worker puts them on logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from slipstream.core.drafts import row_paths
from slipstream.core.errors import SlipstreamError
from slipstream.core.outputs import StepOutput
from slipstream.core.request import FinishReason, Request
from slipstream.core.scheduler import Scheduler
from slipstream.core.step import ScheduledStep
from slipstream.engine.grammar_host import GrammarHost
from slipstream.worker.sample.structured_output import GrammarMasks

# What a step waits for masks at most. A request without one is left out of steps until it has it, which costs the
# others nothing more: so slow grammars cost them this once.
GRACE_S = 0.03


@dataclass(slots=True)
class StepMasks:
    """failures: requests whose grammar failed, with the error; late: those whose masks are not there yet. The tokens of
    both mean nothing."""

    masks: GrammarMasks
    failures: list[tuple[Request, SlipstreamError]] = field(default_factory=list)
    late: list[Request] = field(default_factory=list)


class StructuredOutputs:
    """A request is held, which means not scheduled, until its grammar is compiled; then only while a grammar that takes
    long for a token makes its mask. fail: ends a request with an error."""

    def __init__(
        self,
        host: GrammarHost,
        scheduler: Scheduler,
        fail: Callable[[Request, SlipstreamError, list[StepOutput]], None],
    ) -> None:
        self._host, self._scheduler, self._fail = host, scheduler, fail
        self._live: set[int] = set()  # by sequence_id; while there is none, a step's tokens are not gone through

    def start(self, requests: Sequence[Request]) -> None:
        """Start the grammars of one client request, which the scheduler has taken."""
        states = [request.guide_state for request in requests if request.guide_state is not None]
        if states:
            self._live.update(state.request.sequence_id for state in states)
            self._host.start(states)

    def poll(self, outputs: list[StepOutput], timeout: float = 0.0) -> None:
        """Hear what has become of grammars, and of requests by them. Waits `timeout` seconds at most."""
        for state in self._host.poll(timeout):
            request = state.request
            if request.is_finished:
                continue
            if state.error is not None:
                self._fail(request, state.error, outputs)
            elif state.is_terminated:
                output = self._scheduler.finish(request, FinishReason.STOP)
                outputs += [output] if output is not None else []
            else:
                request.is_held = not state.is_settled

    def concerns(self, step: ScheduledStep) -> bool:
        """Whether some row of a step waits for a mask."""
        if not self._live:
            return False
        return any(request.guide_state is not None and samples for request, samples in zip(step.requests, step.samples))

    def masks(self, step: ScheduledStep) -> StepMasks:
        """For the sampled rows of a step, once they are there or GRACE_S have passed."""
        guided: list[tuple[Request, int, int]] = []  # request, its first sampled row, its number of drafts
        row = 0
        for request, samples, num_drafts in zip(step.requests, step.samples, step.num_drafts):
            if samples:
                if request.guide_state is not None:
                    guided.append((request, row, num_drafts))
                row += 1 + num_drafts
        self._collect(guided)
        found = StepMasks(GrammarMasks())
        rows, sources, dead_rows = found.masks.rows, [], found.masks.dead_rows
        for request, first, num_drafts in guided:
            state = request.guide_state
            if state.error is not None:
                found.failures.append((request, state.error))
            elif not state.is_settled or state.is_terminated:
                found.late.append(request)
            else:
                for place in range(1 + num_drafts):  # the matrix has the draft rows behind the request's own
                    if place and place - 1 in state.dead:
                        dead_rows.append(first + place)
                    else:
                        rows.append(first + place)
                        sources.append(state.row + place)
        bits = self._host.masks[torch.tensor(sources)].numpy() if rows else found.masks.bits
        found.masks = GrammarMasks(rows, bits, dead_rows)
        return found

    def advance(self, committed: list[StepOutput]) -> None:
        """Advance matchers by a step's tokens. Without an end token only the grammar knows whether another may
        follow."""
        for output in committed if self._live else ():
            request, state = output.request, output.request.guide_state
            if state is not None and not request.is_finished and output.new_token_ids:
                self._host.advance(state, output.new_token_ids)
                request.is_held = state.is_slow or not state.end_token_ids

    def withdraw(self, step: ScheduledStep, token_ids: list[list[int]], late: Sequence[Request]) -> None:
        """Take requests whose masks were late out of a step that is not committed. They do not draft any more: a tree
        of drafts wants many masks at once."""
        for request in late:
            state = request.guide_state
            state.is_slow, state.wants_walk = True, False
            request.speculation = None
            request.is_held = not state.is_settled
        for place, request in enumerate(step.requests):
            if request in late:
                token_ids[place] = []
        self._scheduler.withdraw(step, list(late))

    def forget(self, requests: Sequence[Request]) -> None:
        for request in requests if self._live else ():
            if request.guide_state is not None:
                self._live.discard(request.sequence_id)
                self._host.forget(request.guide_state)

    def close(self) -> None:
        self._host.close()

    def _collect(self, guided: Sequence[tuple[Request, int, int]]) -> None:
        """Wait for the masks of last tokens, then for those behind drafts."""
        self._host.collect([request.guide_state for request, _, _ in guided], GRACE_S)
        walking = []
        for request, _, num_drafts in guided:
            state = request.guide_state
            if num_drafts and state.is_ready and not state.asked_at:
                paths = row_paths(request.draft_parents[:num_drafts], request.draft_token_ids[:num_drafts])
                self._host.walk(state, paths[1:])
                walking.append(state)
        self._host.collect(walking, GRACE_S)
