"""Structured output in the engine: holds requests until their grammar is ready, and gets the masks of each step.

Engine thread. The masks come from another process (grammar_host.py); the worker applies them to logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from slipstream.core.drafts import row_paths
from slipstream.core.errors import SlipstreamError
from slipstream.core.outputs import StepOutputs
from slipstream.core.request import FinishReason, Request
from slipstream.core.scheduler import Scheduler
from slipstream.core.step import ScheduledStep
from slipstream.engine.grammar_host import GrammarHost
from slipstream.worker.sample.structured_output import GrammarMasks

# Longest time that a step waits for masks. A request without its mask is left out of steps until it has it, so a slow
# grammar delays the others only once.
GRACE_S = 0.03


@dataclass(slots=True)
class StepMasks:
    """failures: requests whose grammar failed, with the error. late: requests without their masks. The sampled tokens
    of both are invalid."""

    masks: GrammarMasks
    failures: list[tuple[Request, SlipstreamError]] = field(default_factory=list)
    late: list[Request] = field(default_factory=list)


class StructuredOutputs:
    """A request is held (not scheduled) until its grammar is compiled, and later while a slow grammar makes a mask.

    fail: ends a request with an error."""

    def __init__(
        self,
        host: GrammarHost,
        scheduler: Scheduler,
        fail: Callable[[Request, SlipstreamError, StepOutputs], None],
    ) -> None:
        self._host, self._scheduler, self._fail = host, scheduler, fail
        self._live: set[int] = set()  # sequence ids; while empty, steps are not inspected

    def start(self, requests: Sequence[Request]) -> None:
        """Start the grammars of one client request, which the scheduler has taken."""
        states = [request.grammar_state for request in requests if request.grammar_state is not None]
        if states:
            self._live.update(state.request.sequence_id for state in states)
            self._host.start(states)

    def poll(self, outputs: StepOutputs, timeout: float = 0.0) -> None:
        """Handle results of grammars, waiting at most `timeout` seconds."""
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

    def needs_masks(self, step: ScheduledStep) -> bool:
        """Whether some row of a step needs a mask."""
        if not self._live:
            return False
        return any(one.grammar_state is not None and samples for one, samples in zip(step.requests, step.samples))

    def masks(self, step: ScheduledStep) -> StepMasks:
        """The masks of a step's sampled rows, once all are ready or GRACE_S have passed."""
        masked: list[tuple[Request, int, int]] = []  # request, its first sampled row, its number of drafts
        row = 0
        for request, samples, num_drafts in zip(step.requests, step.samples, step.num_drafts):
            if samples:
                if request.grammar_state is not None:
                    masked.append((request, row, num_drafts))
                row += 1 + num_drafts
        self._collect(masked)
        found = StepMasks(GrammarMasks())
        rows, sources, dead_rows = found.masks.rows, [], found.masks.dead_rows
        for request, first, num_drafts in masked:
            state = request.grammar_state
            if state.error is not None:
                found.failures.append((request, state.error))
            elif not state.is_settled or state.is_terminated:
                found.late.append(request)
            else:
                for index in range(1 + num_drafts):  # rows of drafts follow the request's own
                    if index and (state.is_slow or index - 1 in state.dead):
                        dead_rows.append(first + index)
                    else:
                        rows.append(first + index)
                        sources.append(state.row + index)
        bits = self._host.masks[torch.tensor(sources)].numpy() if rows else found.masks.bits
        found.masks = GrammarMasks(rows, bits, dead_rows)
        return found

    def advance(self, committed: StepOutputs) -> None:
        """Advance matchers by a step's tokens. A request without end tokens is held until its grammar says whether
        another token may follow."""
        for output in committed if self._live else ():
            request, state = output.request, output.request.grammar_state
            if state is not None and not request.is_finished and output.new_token_ids:
                self._host.advance(state, output.new_token_ids)
                request.is_held = state.is_slow or not state.end_token_ids

    def withdraw(self, step: ScheduledStep, token_ids: list[list[int]], late: Sequence[Request]) -> None:
        """Remove requests with late masks from a step that is not committed. They stop speculating, because drafts
        need many masks at once."""
        for request in late:
            state = request.grammar_state
            state.is_slow, state.wants_walk = True, False
            request.speculation = None
            request.is_held = not state.is_settled
        for index, request in enumerate(step.requests):
            if request in late:
                token_ids[index] = []
        self._scheduler.withdraw(step, list(late))

    def forget(self, requests: Sequence[Request]) -> None:
        for request in requests if self._live else ():
            if request.grammar_state is not None:
                self._live.discard(request.sequence_id)
                self._host.forget(request.grammar_state)

    def close(self) -> None:
        self._host.close()

    def _collect(self, masked: Sequence[tuple[Request, int, int]]) -> None:
        """Wait for the masks of last tokens, then for those of drafts. Not for drafts of a slow grammar: walking over
        them might take longer than a token may."""
        self._host.collect([request.grammar_state for request, _, _ in masked], GRACE_S)
        walking = []
        for request, _, num_drafts in masked:
            state = request.grammar_state
            if num_drafts and state.is_ready and not state.asked_at and not state.is_slow:
                paths = row_paths(request.draft_parents[:num_drafts], request.draft_token_ids[:num_drafts])
                self._host.walk(state, paths[1:])
                walking.append(state)
        self._host.collect(walking, GRACE_S)
