"""Guided decoding in the step: who is held back while a grammar is worked on, and the masks of guided rows, put on
the logits in one go. Engine thread. The masks come from another process (grammar_host.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from slipstream.core.errors import SlipstreamError
from slipstream.core.outputs import StepOutput
from slipstream.core.request import FinishReason, Request
from slipstream.core.scheduler import Scheduler
from slipstream.core.step import ScheduledStep
from slipstream.runtime.grammar_host import GrammarHost
from slipstream.runtime.grammar_state import GuideState
from slipstream.worker.sample.penalties import Paths

# What a step waits for masks at most. A request without one is left out of steps until it has it, which costs the
# others nothing more: so slow grammars cost them this once.
GRACE_S = 0.03


@dataclass(slots=True)
class GuideFailures:
    """requests: whose grammar failed, with the error; their rows are left alone. late: whose masks are not there yet;
    their rows mean nothing. dead_rows: of drafts that the grammar forbids, or after which nothing may come."""

    requests: list[tuple[Request, SlipstreamError]] = field(default_factory=list)
    late: list[Request] = field(default_factory=list)
    dead_rows: set[int] = field(default_factory=set)


class GuideMasks:
    """The step's bitmasks: of guided rows only."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._bitmask = torch.empty(0, 0, dtype=torch.int32)

    def apply(
        self,
        logits: torch.Tensor,
        requests: list[Request],
        rows: list[int],
        paths: Paths | None = None,
    ) -> GuideFailures:
        """Set forbidden logits to -inf in place; row r of logits [num_rows, vocab] fp32 belongs to requests[r].

        paths: the drafts that lead to each row.
        """
        states: dict[int, GuideState] = {}
        walked: dict[int, list[int]] = {}  # request_id -> its rows behind drafts
        for row in rows:
            request = requests[row]
            states[request.request_id] = request.guide_state
            if paths and paths[row]:
                walked.setdefault(request.request_id, []).append(row)
        host = requests[rows[0]].guide_state.host
        self._collect(host, states, walked, paths)
        failures = GuideFailures()
        masked, sources = [], []
        for request in {requests[row].request_id: requests[row] for row in rows}.values():
            state = states[request.request_id]
            if state.error is not None:
                failures.requests.append((request, state.error))
            elif not state.is_settled or state.is_terminated:
                failures.late.append(request)
        unmasked = {request.request_id for request, _ in failures.requests}
        unmasked |= {request.request_id for request in failures.late}
        for row in rows:
            request_id = requests[row].request_id
            if request_id in unmasked:
                continue
            state, place = states[request_id], -1
            if paths and paths[row]:
                place = walked[request_id].index(row)
                if place in state.dead:
                    failures.dead_rows.add(row)
                    continue
            masked.append(row)
            sources.append(state.row + 1 + place)
        if masked:
            self._mask(logits, host.masks, masked, sources)
        return failures

    def _collect(
        self, host: GrammarHost, states: dict[int, GuideState], walked: dict[int, list[int]], paths: Paths | None
    ) -> None:
        host.collect(list(states.values()), GRACE_S)
        walking = [one for one in walked if states[one].is_ready and not states[one].asked_at]
        for request_id in walking:
            assert paths is not None
            host.walk(states[request_id], [paths[row] for row in walked[request_id]])
        host.collect([states[request_id] for request_id in walking], GRACE_S)

    def _mask(self, logits: torch.Tensor, masks: torch.Tensor, rows: list[int], sources: list[int]) -> None:
        import xgrammar

        if self._bitmask.shape[0] < logits.shape[0]:
            bitmask = xgrammar.allocate_token_bitmask(max(8, 2 * logits.shape[0]), self._vocab_size)
            self._bitmask = bitmask.pin_memory() if self._device.type == "cuda" else bitmask
        self._bitmask[torch.tensor(rows)] = masks[torch.tensor(sources)]
        bitmask = self._bitmask[: logits.shape[0]].to(self._device)  # `indices` skips the rows that hold old bits
        xgrammar.apply_token_bitmask_inplace(logits, bitmask, vocab_size=self._vocab_size, indices=rows)


class GuidedRequests:
    """Those of the engine. A request is held, which means not scheduled, until its grammar is compiled; then only while
    a grammar that takes long for a token makes its mask. fail: ends a request with an error."""

    def __init__(
        self,
        host: GrammarHost,
        scheduler: Scheduler,
        fail: Callable[[Request, SlipstreamError, list[StepOutput]], None],
    ) -> None:
        self._host, self._scheduler, self._fail = host, scheduler, fail
        self._live: set[int] = set()  # by request_id; while there is none, a step's tokens are not gone through

    def start(self, requests: Sequence[Request]) -> None:
        """Of one client request, which the scheduler has taken."""
        states = [request.guide_state for request in requests if request.guide_state is not None]
        if states:
            self._live.update(state.request.request_id for state in states)
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

    def advance(self, committed: list[StepOutput]) -> None:
        """Move on by a step's tokens. Without an end token, nobody but the grammar says whether one more may come."""
        for output in committed if self._live else ():
            request, state = output.request, output.request.guide_state
            if state is not None and not request.is_finished and output.new_token_ids:
                self._host.advance(state, output.new_token_ids)
                request.is_held = state.is_slow or not state.end_token_ids

    def withdraw(self, step: ScheduledStep, token_ids: list[list[int]], late: list[Request]) -> None:
        """Take requests whose masks were late out of a step that is not committed. They do not draft any more: a tree
        of drafts wants many masks at once."""
        for request in late:
            state = request.guide_state
            state.is_slow, state.wants_walk = True, False
            request.speculation = None
            request.is_held = not state.is_settled
        for place, row in enumerate(step.requests):
            if row.request in late:
                token_ids[place] = []
        self._scheduler.withdraw(step, late)

    def forget(self, requests: Sequence[Request]) -> None:
        for request in requests if self._live else ():
            if request.guide_state is not None:
                self._live.discard(request.request_id)
                self._host.forget(request.guide_state)

    def close(self) -> None:
        self._host.close()
