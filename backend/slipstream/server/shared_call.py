"""A call on a thread of its own, whose result all who wait for it share: what paths without a key make the gateway do.

However many ask, it runs once at a time, and takes none of the threads that finish answers. Event loop thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedCall(Generic[T]):
    """is_kept: it is made once, for good."""

    def __init__(self, make: Callable[[], T], is_kept: bool = False) -> None:
        self._make, self._is_kept = make, is_kept
        self._thread = ThreadPoolExecutor(1, "shared")
        self._running: asyncio.Future[T] | None = None

    async def result(self) -> T:
        if self._running is None or (self._running.done() and not self._is_kept):
            self._running = asyncio.get_running_loop().run_in_executor(self._thread, self._make)
        return await asyncio.shield(self._running)
