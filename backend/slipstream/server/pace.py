"""Number of tokens per streamed event: one, until a worker reaches its maximum rate of events.

Event loop thread, one per worker. An event costs the gateway about 50 us at any size, so above `max_events_per_s` new
requests ask the engine for several tokens per response (the first token is still sent at once).
"""

from __future__ import annotations

import math
import time

MAX_INTERVAL = 32
_WINDOW_S = 0.5


class Pace:
    """The streams count num_tokens, num_events and num_disconnects."""

    def __init__(self, max_events_per_s: int) -> None:
        self._max_events_per_s = max_events_per_s
        self.num_streams = 0
        self.num_tokens = 0
        self.num_events = 0
        self.num_disconnects = 0
        self.reported: dict[str, int] = {}  # what metrics have of the counts
        self._tokens_per_stream_s = 0.0  # of the busiest recent window
        self._window = (time.monotonic(), 0)
        self._stream_seconds = 0.0
        self._changed = time.monotonic()

    def enter(self) -> int:
        """Register a new stream. Returns its number of tokens per event."""
        self._count(1)
        if not self._max_events_per_s:
            return 1
        wanted = self.num_streams * self._tokens_per_stream_s / self._max_events_per_s
        return min(MAX_INTERVAL, max(1, math.ceil(wanted)))

    def leave(self) -> None:
        self._count(-1)

    def _count(self, change: int) -> None:
        """Update the window's mean number of streams, and at its end the tokens per stream and second."""
        now = time.monotonic()
        self._stream_seconds += self.num_streams * (now - self._changed)
        self._changed = now
        self.num_streams += change
        started, tokens_before = self._window
        if now - started >= _WINDOW_S:
            if self._stream_seconds > 0:
                rate = (self.num_tokens - tokens_before) / self._stream_seconds
                self._tokens_per_stream_s = rate
            self._window, self._stream_seconds = (now, self.num_tokens), 0.0
