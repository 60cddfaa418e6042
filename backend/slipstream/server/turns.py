"""Large requests are read one at a time, with a pause behind each, in which the event loop serves the others.

A body of 4 MiB takes the event loop of the reader up to 0.8 s, in calls of C that nothing interrupts, and that of a
worker up to 20 ms: twelve of the former, one behind the other, held up every other request for 16 s. Event loop thread.
"""

from __future__ import annotations

import asyncio
import time

MAX_READ_AT_ONCE_BYTES = 128 << 10  # 20 ms; a body up to here waits for no turn
_MAX_PAUSE_S = 0.5


class Turns:
    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self) -> Turn:
        await self._lock.acquire()
        return Turn(self._lock)


class Turn:
    """The turn of the request that may be read now, until end(); the next one begins as long after it as it took."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock, self._is_over = lock, False
        self._begun = time.monotonic()

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            pause_s = min(time.monotonic() - self._begun, _MAX_PAUSE_S)
            asyncio.get_running_loop().call_later(pause_s, self._lock.release)
