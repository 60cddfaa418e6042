"""Calls whose result all who wait for it share: what paths without a key make the gateway do. However many ask, it is
done once at a time. Event loop thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedCall(Generic[T]):
    """On a thread of its own, none of those that finish answers. is_kept: it is made once, for good."""

    def __init__(self, make: Callable[[], T], is_kept: bool = False) -> None:
        self._make, self._is_kept = make, is_kept
        self._thread = ThreadPoolExecutor(1, "shared")
        self._running: asyncio.Future[T] | None = None

    async def result(self) -> T:
        if self._running is None or (self._running.done() and not self._is_kept):
            self._running = asyncio.get_running_loop().run_in_executor(self._thread, self._make)
        return await asyncio.shield(self._running)


class SharedTask(Generic[T]):
    """On the event loop."""

    def __init__(self) -> None:
        self._running: asyncio.Task[T] | None = None

    async def result(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(make())
        return await asyncio.shield(self._running)
