"""The engine's side of structured output: orders compilation and matching of grammars, and handles the results.

Engine thread only. Only `collect` waits for grammars, for a bounded time; a request without its mask is left out of
steps. A grammar that exceeds its limits fails its own request. A stuck worker is killed, and the other sequences resume
in a new one from their tokens; the same happens if a process is killed from outside, up to MAX_KILLS times in a row.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.core.config import EngineConfig
from slipstream.core.drafts import MAX_DRAFT_TOKENS
from slipstream.core.errors import CapacityError, EngineError, RequestError, SlipstreamError, internal_error
from slipstream.core.grammar_limits import FIELD
from slipstream.engine.grammar_link import GrammarLink
from slipstream.engine.grammar_messages import MAX_KILLS, Answer, Setup
from slipstream.engine.grammar_rows import MaskRows
from slipstream.engine.grammar_state import GrammarState
from slipstream.engine.grammar_verdicts import MAX_KNOWN_GRAMMARS, Verdicts, key_of

logger = logging.getLogger(__name__)

DEAD_END = "the grammar admits neither another token nor the end after the text so far"
_SLOW_TOKEN_S = 0.005  # steps do not wait for a grammar that takes longer per token
_NUM_QUICK = 32  # consecutive quick answers after which it counts as quick again
_KILL_DELAY_S = 2.0  # time beyond its limit for a call of an ended request, before its worker is killed
_CHECK_S = 0.02  # interval of checking time limits


class GrammarHost:
    """rows_per_state: masks of the next token and of its drafts. num_states: max open states; further ones wait."""

    def __init__(self, setup: Setup, num_states: int, rows_per_state: int) -> None:
        self._limits = setup.limits
        self._link = GrammarLink(setup, num_states * rows_per_state)
        self._verdicts = Verdicts(setup.limits, self._link)
        self._rows = MaskRows(num_states, rows_per_state)
        self._is_ready = False  # a worker may be started: the process runs and has reported the last worker's end
        self._suspects: list[GrammarState] = []  # with calls in the worker that ended, longest call first
        self._states: dict[int, GrammarState] = {}  # started, not forgotten
        self._num_started = 0
        self._compiled: OrderedDict[bytes, list[GrammarState] | None] = OrderedDict()  # list: waiting for compilation
        self._stuck: dict[int, GrammarState] = {}  # by id: forgotten during a call
        self._changed: list[GrammarState] = []
        self._check_due = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._states and not self._stuck

    @property
    def masks(self) -> torch.Tensor:
        """[rows, vocab_size / 32] int32, written by the worker."""
        return self._link.masks

    def start(self, states: Sequence[GrammarState]) -> None:
        """Compile the grammar that the states share, if needed, and create a matcher for each."""
        guide = states[0].guide
        key = key_of(guide)
        for state in states:
            self._num_started += 1
            state.host, state.key, state.state_id = self, key, self._num_started
            self._states[state.state_id] = state
        verdict = self._verdicts.find(key)
        if verdict is None:
            self._verdicts.wait(key, states)
        elif verdict:
            for state in states:
                self._end(state, RequestError(FIELD, verdict))
        else:
            self._open(states)

    def advance(self, state: GrammarState, token_ids: list[int]) -> None:
        """Accept sampled tokens and compute the next mask."""
        state.token_ids += token_ids
        state.wants_walk = state.has_walked = False
        state.is_ready = False
        if state.is_open and not state.asked_at:
            self._send_rest(state)

    def walk(self, state: GrammarState, paths: list[tuple[int, ...]]) -> None:
        """Compute the masks after drafts too. The state must have no pending call."""
        state.wants_walk, state.has_walked, state.dead = True, False, ()
        self._ask(state, self._limits.max_step_ms / 1e3, "walk", paths)

    def forget(self, state: GrammarState) -> None:
        """The sequence has ended."""
        if self._states.pop(state.state_id, None) is None:
            return
        if self._verdicts.leave(state) or self._rows.leave(state):
            return
        if state.row >= 0:
            if state.asked_at:
                self._stuck[state.state_id] = state
            else:
                self._give_back(state.row)
            self._link.send_to_worker("close", state.state_id, False)

    def poll(self, timeout: float = 0.0) -> list[GrammarState]:
        """Handle received messages, waiting at most `timeout` seconds; returns the states that changed."""
        self._link.reap()
        if self.is_idle:
            return []
        self._receive(timeout)
        now = time.monotonic()
        if now >= self._check_due:
            self._check_due = now + _CHECK_S
            self._check_times(now)
        changed, self._changed = self._changed, []
        return changed

    def collect(self, states: Sequence[GrammarState], timeout: float) -> None:
        """Wait until none of the states has a pending call, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not all(state.is_settled for state in states):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._receive(left)

    def close(self) -> None:
        """End the processes without waiting for them."""
        self._states.clear()
        self._link.drop_process()

    # ---- parts

    def _receive(self, timeout: float) -> None:
        self._link.receive(timeout, self._take_notice, self._take_answer)
        if self._link.process_is_lost:
            self._restart_process()
        elif self._link.worker_is_lost:
            self._restart_worker()

    def _take_notice(self, kind: str, *arguments: Any) -> None:
        """Handle a notice of `GrammarLink.receive`."""
        if kind == "verdict":
            self._take_verdict(*arguments)
        elif kind == "worker":
            self._hand_out_rows()
        else:
            if kind == "ended":
                self._take_end(*arguments)
            self._is_ready = True
            self._reopen()

    def _take_verdict(self, key: bytes, verdict: str, text: str) -> None:
        states, error = self._verdicts.take(key, verdict, text)
        if error is None:
            self._open(states)
            return
        for state in states:
            self._end(state, error)

    def _open(self, states: Sequence[GrammarState]) -> None:
        """Open states whose grammar has passed its trial, when a worker has free rows."""
        if not states:
            return
        if not self._is_ready:
            self._link.start_process()
            return
        if not self._link.has_worker:
            self._link.start_worker()
        for state in states:
            self._rows.wait(state)
        self._hand_out_rows()

    def _hand_out_rows(self) -> None:
        while self._link.worker_is_ready and (state := self._rows.next()) is not None:
            if state.key not in self._compiled:  # the worker compiles a text for its first state
                self._compiled[state.key] = []
            elif (waiting := self._compiled[state.key]) is not None:
                waiting.append(state)
                continue
            self._ask_to_open(state)

    def _ask_to_open(self, state: GrammarState) -> None:
        state.num_sent = len(state.token_ids)
        seconds = 4 * self._limits.max_compile_ms / 1e3 + self._limits.max_request_ms / 1e3
        self._ask(state, seconds, "open", state.key, state.guide, state.end_token_ids, state.row, list(state.token_ids))

    def _send_rest(self, state: GrammarState) -> None:
        token_ids = state.token_ids[state.num_sent :]
        state.num_sent = len(state.token_ids)
        self._ask(state, self._limits.max_step_ms / 1e3, "advance", token_ids)

    def _ask(self, state: GrammarState, seconds: float, kind: str, *arguments: Any) -> None:
        state.is_ready = state.is_ready and kind == "walk"
        state.asked_at, state.asked_s = time.monotonic(), seconds
        self._link.send_to_worker(kind, state.state_id, state.is_slow, *arguments)

    def _take_answer(self, state_id: int, answer: Answer) -> None:
        forgotten = self._stuck.pop(state_id, None)
        if forgotten is not None:
            self._link.send_to_worker("close", state_id, False)  # the call may have opened what `forget` closed
            self._give_back(forgotten.row)
            self._let_others_open(forgotten.key)
            return
        state = self._states.get(state_id)
        if state is None:
            return
        state.asked_at, state.is_open = 0.0, True
        self._let_others_open(state.key)
        if state.error is None:
            self._handle_answer(state, answer)

    def _let_others_open(self, key: bytes) -> None:
        waiting = self._compiled.get(key)
        if waiting is not None:
            self._compiled[key] = None
            self._compiled.move_to_end(key)
            self._forget_compiled()
            for other in waiting:
                if other.state_id in self._states:
                    self._ask_to_open(other)

    def _forget_compiled(self) -> None:
        """Drop the oldest entries beyond the limit; the next state with such a text counts as the first."""
        oldest = next(iter(self._compiled))
        if len(self._compiled) > MAX_KNOWN_GRAMMARS and self._compiled[oldest] is None:
            del self._compiled[oldest]

    def _handle_answer(self, state: GrammarState, answer: Answer) -> None:
        self._changed.append(state)
        limit, name = self._limits.max_request_ms, state.guide.type
        is_walk = state.wants_walk and state.is_ready
        if is_walk:
            state.walk_cpu_s += answer.cpu_s
            if state.walk_cpu_s > limit / 1e3:
                state.request.speculation = None  # drafts may cost as much as the text, but not the answer
        else:
            state.cpu_s += answer.cpu_s
        if answer.error:
            self._end(state, internal_error(logger, "matching a grammar", EngineError(answer.error)))
        elif not answer.can_go_on and not state.token_ids:
            self._end(state, RequestError(FIELD, f"not a usable {name}: it admits no text"))
        elif answer.is_terminated:
            state.is_terminated = True
        elif not answer.can_go_on:
            self._end(state, RequestError(FIELD, DEAD_END))
        elif state.cpu_s > limit / 1e3:
            spent = f"{state.cpu_s:.1f} s of CPU time for {len(state.token_ids)} tokens"
            self._end(state, RequestError(FIELD, f"this {name} took {spent}, accepted: guided_max_request_ms={limit}"))
        elif state.num_sent < len(state.token_ids):
            self._send_rest(state)
        else:
            state.is_ready, state.has_walked, state.dead = True, is_walk, answer.dead
            is_quick = is_walk or answer.cpu_s < _SLOW_TOKEN_S
            state.num_quick = state.num_quick + 1 if is_quick else 0
            state.is_slow = not is_quick or (state.is_slow and state.num_quick < _NUM_QUICK)

    def _end(self, state: GrammarState, error: SlipstreamError) -> None:
        state.error, state.is_ready = error, False
        self._changed.append(state)

    def _give_back(self, row: int) -> None:
        self._rows.give_back(row)
        self._hand_out_rows()

    def _check_times(self, now: float) -> None:
        self._link.check(now, is_awaited=self._verdicts.is_trying or not self._is_ready)
        for state in list(self._states.values()):
            if state.asked_at and state.error is None and now - state.asked_at > state.asked_s:
                text = f"this {state.guide.type} takes more than {state.asked_s:g} s for one token"
                limit = f"accepted: guided_max_step_ms={self._limits.max_step_ms}"
                self._end(state, RequestError(FIELD, f"{text} after {len(state.token_ids)}, {limit}"))
        if any(now > state.asked_at + state.asked_s + _KILL_DELAY_S for state in self._stuck.values()):
            logger.warning("a grammar is stuck: its process is killed, other guided requests go on in a new one")
            self._restart_worker()

    def _restart_worker(self) -> None:
        """Resume the worker's states in a new one, once the end of the old one has been reported."""
        asked = [state for state in self._states.values() if state.asked_at and state.error is None]
        self._suspects = [] if self._stuck else sorted(asked, key=lambda state: state.asked_at)
        if not self._link.worker_is_ready:  # it had no states
            for state in self._states.values():
                if not self._verdicts.is_waiting(state):
                    self._count_death(state)
        self._is_ready = False
        self._link.drop_worker()
        self._reopen()

    def _take_end(self, is_crash: bool) -> None:
        """is_crash: the worker crashed, perhaps in the call that ran longest; otherwise no state is to blame."""
        suspects, self._suspects = self._suspects, []
        for state in suspects[:1] if is_crash else suspects:
            self._count_death(state, is_crash)

    def _restart_process(self) -> None:
        logger.warning("the process of structured output is gone: guided requests go on in a new one")
        self._is_ready, self._suspects = False, []
        self._link.drop_process()
        for state in self._states.values():
            if not state.is_settled:
                self._count_death(state)
        self._verdicts.try_again()
        self._reopen()

    def _count_death(self, state: GrammarState, is_crash: bool = False) -> None:
        """Fail the request at its second crash without a new token in between."""
        if state.error is not None or state.state_id not in self._states:
            return
        if len(state.token_ids) > state.num_tokens_at_death:
            state.num_tokens_at_death, state.num_kills, state.num_crashes = len(state.token_ids), 0, 0
        state.num_kills += not is_crash
        state.num_crashes += is_crash
        if state.num_crashes > 1:
            text = f"matching this {state.guide.type} takes more memory than guided_memory_bytes"
            self._end(state, RequestError(FIELD, f"{text}={self._limits.memory_bytes}, or cannot be done"))
        elif state.num_kills >= MAX_KILLS:
            text = f"its process ended {MAX_KILLS} times in a row before the next token"
            self._end(state, CapacityError(f"structured output is not available: {text}, the server's log may say why"))

    def _reopen(self) -> None:
        self._stuck.clear()
        self._compiled.clear()
        self._rows.reset()
        states = [state for state in self._states.values() if not self._verdicts.is_waiting(state)]
        for state in states:
            state.row, state.asked_at, state.is_ready, state.is_open = -1, 0.0, False, False
        self._open([state for state in states if state.error is None and not state.is_terminated])


def make_grammar_host(
    config: EngineConfig, tokenizer_path: Path, vocab_size: int, eos_token_ids: list[int], has_drafts: bool
) -> GrammarHost:
    """For two steps of the most sequences. has_drafts: sequences may need masks after each draft, too."""
    setup = Setup(str(tokenizer_path), vocab_size, eos_token_ids, config.structured_output)
    return GrammarHost(setup, 2 * config.scheduler.max_num_seqs, 1 + MAX_DRAFT_TOKENS if has_drafts else 1)
