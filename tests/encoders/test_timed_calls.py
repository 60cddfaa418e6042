"""Calls that hang are waited for no longer than the limit, and hold up nothing once they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from slipstream.encoders.timed_calls import CallTimeout, TimedCalls


async def _give(value: Any) -> Any:
    return value


async def _fail() -> None:
    raise ZeroDivisionError


def test_results_and_errors_are_the_callers() -> None:
    async def run() -> None:
        calls = TimedCalls(10)
        assert await calls.run(_give(7)) == 7
        with pytest.raises(ZeroDivisionError):
            await calls.run(_fail())
        assert await asyncio.gather(*(calls.run(_give(number)) for number in range(9))) == list(range(9))

    asyncio.run(run())


def test_while_one_hangs_others_fail_at_once_and_afterwards_they_do_not() -> None:
    async def run() -> None:
        calls, may_end, made = TimedCalls(0.1), asyncio.Event(), []
        with pytest.raises(CallTimeout, match="no answer in 100 ms"):
            await calls.run(may_end.wait())
        with pytest.raises(CallTimeout, match="an earlier call still has no answer"):
            await calls.run(_made(made))
        assert not made
        may_end.set()
        await _until_free(calls)

    asyncio.run(run())


def test_one_who_leaves_harms_no_later_call_and_his_own_goes_on() -> None:
    async def run() -> None:
        calls, may_end, made = TimedCalls(20), asyncio.Event(), []

        async def slow() -> None:
            await may_end.wait()
            made.append("slow")

        waiter = asyncio.ensure_future(calls.run(slow()))
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert await calls.run(_give("next")) == "next", "it waited for its turn"
        may_end.set()
        await asyncio.sleep(0.01)
        assert made == ["slow"]

    asyncio.run(run())


def test_a_call_that_fails_after_it_was_given_up_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        calls, may_end = TimedCalls(0.05), asyncio.Event()

        async def late() -> None:
            await may_end.wait()
            raise ZeroDivisionError

        with pytest.raises(CallTimeout):
            await calls.run(late())
        may_end.set()
        await _until_free(calls)

    asyncio.run(run())
    assert not caplog.records, "asyncio complains of an error that nobody took"


def _made(made: list[int]) -> Coroutine[Any, Any, None]:
    async def make() -> None:
        made.append(1)

    return make()


async def _until_free(calls: TimedCalls) -> None:
    for _ in range(100):
        try:
            assert await calls.run(_give("again")) == "again"
            return
        except CallTimeout:
            await asyncio.sleep(0.01)
    raise AssertionError("the calls never came back")
