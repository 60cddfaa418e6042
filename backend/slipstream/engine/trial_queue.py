"""Orders the trials of grammars in the forking process. Two lanes: every grammar first gets a short time, and those
that need more go to a second lane, so that usual schemas never wait for costly ones.

In a lane shorter texts go first, because they are likely cheaper, but only if they arrive soon: each TRIAL_CHARS_PER_S
characters count as one second of later arrival. The key of a text is constant and known on arrival, as in
core/queue_order.py.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from slipstream.core.sampling_params import Guide

MAX_LONG_TRIALS = 32  # waiting or running in the second lane; beyond it a grammar is refused with UNAVAILABLE
NUM_TRIAL_SLOTS = 2  # concurrent trials per lane
TRIAL_CHARS_PER_S = 10_000


@dataclass(slots=True, eq=False)
class Trial:
    """arrived: time.monotonic(). pid, result_fd, deadline, num_ticks: while it runs; num_ticks is its CPU time at the
    last check, deadline the time of the next check. num_kills: kills from outside (the OOM killer, or by hand)."""

    key: bytes
    guide: Guide
    arrived: float = field(default_factory=time.monotonic)
    is_long: bool = False
    pid: int = 0
    result_fd: int = -1
    deadline: float = 0.0
    num_ticks: int = 0
    num_kills: int = 0


class TrialQueue:
    """running: the trials that the caller runs, maintained by the caller."""

    def __init__(self) -> None:
        self._lanes: tuple[list[Trial], list[Trial]] = ([], [])  # sorted by _order: short, long
        self.running: list[Trial] = []

    def add(self, trial: Trial) -> bool:
        """Queue a trial. Returns False if the second lane is full."""
        num_long = len(self._lanes[1]) + sum(one.is_long for one in self.running)
        if trial.is_long and num_long >= MAX_LONG_TRIALS:
            return False
        insort(self._lanes[trial.is_long], trial, key=_order)
        return True

    def remove(self, key: object) -> list[Trial]:
        """Remove the trials of a text. Returns those that are running."""
        for lane in self._lanes:
            lane[:] = [trial for trial in lane if trial.key != key]
        running = [trial for trial in self.running if trial.key == key]
        for trial in running:
            self.running.remove(trial)
        return running

    def take(self) -> Iterator[Trial]:
        """Dequeue the next trials while lanes have capacity."""
        for is_long, lane in enumerate(self._lanes):
            num_running = sum(trial.is_long == bool(is_long) for trial in self.running)
            for _ in range(min(len(lane), NUM_TRIAL_SLOTS - num_running)):
                yield lane.pop(0)


def _order(trial: Trial) -> float:
    return trial.arrived + len(trial.guide.text) / TRIAL_CHARS_PER_S
