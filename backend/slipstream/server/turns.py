"""Large requests are read one at a time, with a pause behind each, in which the event loop serves the others.

A body of 4 MiB takes the event loop of the reader up to 0.8 s, in calls of C that nothing interrupts, and that of a
worker up to 20 ms: twelve of the former, one behind the other, held up every other request for 16 s. Event loop thread.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_READ_AT_ONCE_BYTES = 128 << 10  # 20 ms; a body up to here waits for no turn
READ_BYTES_PER_S = 256 << 10  # bytes of a body that let it wait for a second behind shorter ones that come later
_MAX_PAUSE_S = 0.5


@dataclass(eq=False)
class _Waiting:
    """A request without a turn. due: shorter bodies that come a little later are read before it."""

    owner: bytes
    due: float
    has_turn: asyncio.Future[None]


class Turns:
    """API keys have turns one after the other: fifty bodies of one key made the body of another wait for five
    seconds."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._is_taken = False
        self._numbers = itertools.count()
        self._last_of: dict[bytes, int] = {}  # the number of the last turn of each key that waits

    async def take(self, owner: bytes, num_bytes: int) -> Turn:
        """owner: the API key. num_bytes: of the body."""
        if self._is_taken:
            loop = asyncio.get_running_loop()
            one = _Waiting(owner, loop.time() + num_bytes / READ_BYTES_PER_S, loop.create_future())
            self._waiting.append(one)
            try:
                await one.has_turn
            except asyncio.CancelledError:
                if one in self._waiting:
                    self._waiting.remove(one)
                else:
                    self._give()
                raise
        self._is_taken = True
        return Turn(self._give)

    def _give(self) -> None:
        """The turn to the next one."""
        self._is_taken = bool(self._waiting)
        if not self._is_taken:
            return self._last_of.clear()
        chosen = min(self._waiting, key=lambda one: (self._last_of.get(one.owner, -1), one.due))
        self._waiting.remove(chosen)
        owners = {one.owner for one in self._waiting}
        self._last_of = {owner: last for owner, last in self._last_of.items() if owner in owners}
        self._last_of[chosen.owner] = next(self._numbers)
        chosen.has_turn.set_result(None)


class Turn:
    """The turn of the request that may be read now, until end(); the next one begins as long after it as it took."""

    def __init__(self, give: Callable[[], None]) -> None:
        self._give, self._is_over = give, False
        self._begun = time.monotonic()

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            pause_s = min(time.monotonic() - self._begun, _MAX_PAUSE_S)
            asyncio.get_running_loop().call_later(pause_s, self._give)
