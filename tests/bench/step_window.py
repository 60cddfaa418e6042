"""The steps of a decode that all of its requests are in. Standard library only, so that it runs beside any engine."""

from __future__ import annotations

from collections.abc import Callable

LEAST_STEPS = 2


class StepWindow:
    """From the step in which the last request gets its token number `first` to that in which the first one ends, each
    counted by its end: prompts, requests that come one after the other and batches that shrink are outside."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._begin: tuple[float, int] | None = None
        self._end: tuple[float, int] | None = None

    def see(self, now: float, has_ended: bool, least: Callable[[], int]) -> None:
        """After each step. now: in seconds. has_ended: any request, yet. least: the fewest tokens that a request has,
        asked only where it matters."""
        if self._begin is None and not has_ended:
            count = least()
            if count >= self._first:
                self._begin = now, count
        elif self._begin is not None and self._end is None and has_ended:
            self._end = now, least()

    @property
    def num_steps(self) -> int:
        return 0 if self._begin is None or self._end is None else self._end[1] - self._begin[1]

    @property
    def seconds(self) -> float:
        """Of a step. Raises AssertionError if there were too few."""
        assert self.num_steps >= LEAST_STEPS, f"{self.num_steps} steps with all requests, {LEAST_STEPS} are needed"
        assert self._begin is not None and self._end is not None
        return (self._end[0] - self._begin[0]) / self.num_steps
