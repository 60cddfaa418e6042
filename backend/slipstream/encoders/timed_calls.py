"""Calls of one model with a time limit.

Event loop thread. Shared by all requests of a process: while a call that timed out still hangs, others fail at once
instead of waiting for their own limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def happens(event: Coroutine[Any, Any, Any], timeout_s: float) -> bool:
    """Whether the event occurs in time. Not asyncio.wait_for, which can lose a cancellation before Python 3.12."""
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
        """The result of the call, or its exception.  Raises CallTimeout.

        A cancelled waiter does not cancel its call: server 2.51 miscounts requests that are cancelled.
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
    """Retrieve a task's exception, which asyncio would otherwise log as never retrieved."""
    if not task.cancelled():
        task.exception()
