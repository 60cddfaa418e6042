"""Calls that hang are waited for no longer than the limit, and hold up nothing once they have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from slipstream.encoders.timed_calls import CallAbandoned, CallTimeout, TimedCalls


def never() -> bool:
    return False


def test_results_and_errors_are_the_callers() -> None:
    calls = TimedCalls("safety", 10)
    assert calls.run(lambda: 7, never) == 7
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 // 0, never)
    assert calls.run(lambda: threading.current_thread().name, never) == "calls of safety"


def test_while_one_hangs_others_fail_at_once_and_afterwards_they_do_not() -> None:
    calls, may_end = TimedCalls("safety", 0.1), threading.Event()
    with pytest.raises(CallTimeout, match="no answer in 100 ms"):
        calls.run(may_end.wait, never)
    started, made = time.monotonic(), []
    with pytest.raises(CallTimeout, match="an earlier call still has no answer"):
        calls.run(lambda: made.append(1), never)
    assert time.monotonic() - started < 0.09 and not made
    may_end.set()
    assert _when_possible(calls) == "again"


def test_one_who_leaves_waits_no_longer_and_harms_no_later_call() -> None:
    calls, may_end = TimedCalls("safety", 20, patience_s=0.1), threading.Event()
    started = time.monotonic()
    with pytest.raises(CallAbandoned):
        calls.run(may_end.wait, lambda: True)
    assert time.monotonic() - started < 5
    threading.Timer(0.1, may_end.set).start()
    assert calls.run(lambda: "next", never) == "next", "it waited for its turn"


def test_the_limit_of_a_call_behind_an_abandoned_one_starts_with_its_turn() -> None:
    calls, may_end = TimedCalls("safety", 1.5, patience_s=0.1), threading.Event()
    _abandon(calls, may_end.wait)
    time.sleep(0.6)
    ends = threading.Timer(0.4, may_end.set)  # within the first call's limit; with the second call beyond one limit
    ends.start()
    assert calls.run(lambda: time.sleep(1.2) or "next", never) == "next"


def test_a_call_behind_an_abandoned_one_that_hangs_fails_with_its_limit() -> None:
    calls, may_end, made = TimedCalls("safety", 0.5, patience_s=0.1), threading.Event(), []
    _abandon(calls, may_end.wait)
    started = time.monotonic()
    with pytest.raises(CallTimeout, match="an earlier call: no answer in 500 ms"):
        calls.run(lambda: made.append(1), never)
    assert time.monotonic() - started < 0.49, "it waited for the rest of the first one's limit only"
    with pytest.raises(CallTimeout, match="an earlier call still has no answer"):
        calls.run(lambda: made.append(2), never)
    may_end.set()
    assert _when_possible(calls) == "again" and not made


def _abandon(calls: TimedCalls, work: Callable[[], object]) -> None:
    with pytest.raises(CallAbandoned):
        calls.run(work, lambda: True)


def _when_possible(calls: TimedCalls) -> str:
    for _ in range(100):
        try:
            return calls.run(lambda: "again", never)
        except CallTimeout:
            time.sleep(0.02)
    raise AssertionError("it hangs for ever")
