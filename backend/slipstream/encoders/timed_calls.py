"""Calls of one model that are waited for no longer than a limit, whatever becomes of them.

Event loop thread. Shared by all requests of a process: while a call that was given up still hangs, others fail at once
instead of each waiting for its own limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def happens(event: Coroutine[Any, Any, Any], timeout_s: float) -> bool:
    """Whether it does in time. Not asyncio.wait_for: before Python 3.12 that swallows a cancellation in that moment."""
    task = asyncio.ensure_future(event)
    try:
        return bool((await asyncio.wait({task}, timeout=timeout_s))[0])
    finally:
        task.cancel()


class CallTimeout(Exception):
    """The model did not answer in time, or an earlier call still hangs."""


class TimedCalls:
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._given_up: set[asyncio.Task[Any]] = set()

    async def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        """What the call gives, or its exception.  Raises CallTimeout.

        A cancelled waiter leaves its call to end by itself: server 2.51 keeps count of requests best that way.
        """
        if self._given_up:
            call.close()
            raise CallTimeout("an earlier call still has no answer")
        task = asyncio.ensure_future(call)
        task.add_done_callback(forget_failure)
        await asyncio.wait({task}, timeout=self._timeout_s)
        if not task.done():
            self._given_up.add(task)
            task.add_done_callback(self._given_up.discard)
            raise CallTimeout(f"no answer in {self._timeout_s * 1e3:.0f} ms")
        return task.result()


def forget_failure(task: asyncio.Task[Any]) -> None:
    """Nobody may be left to hear of it; asyncio would log that."""
    if not task.cancelled():
        task.exception()
