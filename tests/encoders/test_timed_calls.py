"""Calls that hang are waited for no longer than the limit, and hold up nothing once they have ended."""

from __future__ import annotations

import threading
import time

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


def _when_possible(calls: TimedCalls) -> str:
    for _ in range(100):
        try:
            return calls.run(lambda: "again", never)
        except CallTimeout:
            time.sleep(0.02)
    raise AssertionError("it hangs for ever")
