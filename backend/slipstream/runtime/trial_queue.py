"""Which grammar is tried next, in the process that forks. Two lanes: a short time for each grammar, and for those that
need more a lane of their own, so that a usual schema never waits for costly ones.

In a lane a text waits behind shorter ones, as they are likely to be cheaper, but only behind those that come soon: each
TRIAL_CHARS_PER_S characters count as a second of coming later. The order of two texts never changes, so it is known on
arrival (as in core/queue_order.py).
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from slipstream.core.sampling_params import Guide

MAX_LONG_TRIALS = 32  # that wait or run in the second lane; above it a grammar is refused with UNAVAILABLE
NUM_TRIAL_SEATS = 2  # trials at once, in each lane
TRIAL_CHARS_PER_S = 10_000


@dataclass(slots=True, eq=False)
class Trial:
    """arrived: time.monotonic(). pid, result_fd, deadline: while it runs. num_kills: by somebody: the kernel for want
    of memory, or by hand."""

    key: bytes
    guide: Guide
    arrived: float = field(default_factory=time.monotonic)
    is_long: bool = False
    pid: int = 0
    result_fd: int = -1
    deadline: float = 0.0
    num_kills: int = 0


class TrialQueue:
    """running: kept by the caller, who runs them."""

    def __init__(self) -> None:
        self._lanes: tuple[list[Trial], list[Trial]] = ([], [])  # sorted by _order: short, long
        self.running: list[Trial] = []

    def add(self, trial: Trial) -> bool:
        """False: too many wait in the second lane."""
        num_long = len(self._lanes[1]) + sum(one.is_long for one in self.running)
        if trial.is_long and num_long >= MAX_LONG_TRIALS:
            return False
        insort(self._lanes[trial.is_long], trial, key=_order)
        return True

    def remove(self, key: object) -> list[Trial]:
        """Nobody wants it any more. Returns those of it that run."""
        for lane in self._lanes:
            lane[:] = [trial for trial in lane if trial.key != key]
        running = [trial for trial in self.running if trial.key == key]
        for trial in running:
            self.running.remove(trial)
        return running

    def take(self) -> Iterator[Trial]:
        """Those whose turn it is, as long as there are seats. They do not wait any more."""
        for is_long, lane in enumerate(self._lanes):
            num_running = sum(trial.is_long == bool(is_long) for trial in self.running)
            for _ in range(min(len(lane), NUM_TRIAL_SEATS - num_running)):
                yield lane.pop(0)


def _order(trial: Trial) -> float:
    return trial.arrived + len(trial.guide.text) / TRIAL_CHARS_PER_S
