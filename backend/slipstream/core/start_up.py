"""Times the phases from process start to ready, for one line of the log at the end of a load; helps with some."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class StartUp:
    """The first phase is the time before this object is made: spawn, interpreter, imports."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds: dict[str, float] = {"spawn and imports": _process_age()}
        self._threads: list[threading.Thread] = []

    def finish(self, phase: str) -> None:
        """End `phase`, which began at the last call."""
        now = time.monotonic()
        self.seconds[phase] = now - self._last
        self._last = now

    def beside(self, run: Callable[[], None]) -> None:
        """Run something on a thread of its own until `join`. If it raises, its traceback is printed, and no more."""
        self._threads.append(threading.Thread(target=run, name="start-up", daemon=True))
        self._threads[-1].start()

    def join(self) -> None:
        """Wait for what runs beside the phases."""
        for thread in self._threads:
            thread.join()

    def log(self) -> None:
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.seconds.items())
        logger.info("start-up in %.2f s: %s", sum(self.seconds.values()), phases)


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import without the garbage collector, which would look again and again through modules that live for ever: a
    tenth of the CPU time of importing the engine. What exists afterwards it passes over. For the main of a process."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _process_age() -> float:
    """Seconds since this process started; 0 without /proc."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as stat, open("/proc/uptime", encoding="ascii") as uptime:
            start_ticks = int(stat.read().rpartition(")")[2].split()[19])
            return float(uptime.read().split()[0]) - start_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
