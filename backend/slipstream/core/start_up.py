"""Where the time from process start to ready goes, phase by phase, for one line of the log at the end of a load."""

from __future__ import annotations

import logging
import os
import time

logger = logging.getLogger(__name__)


class StartUp:
    """The first phase, everything before this object was made, is the process's own: spawn, interpreter, imports."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds: dict[str, float] = {"spawn and imports": _process_age()}

    def finish(self, phase: str) -> None:
        """The time since the last call belongs to `phase`."""
        now = time.monotonic()
        self.seconds[phase] = now - self._last
        self._last = now

    def log(self) -> None:
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.seconds.items())
        logger.info("start-up in %.2f s: %s", sum(self.seconds.values()), phases)


def _process_age() -> float:
    """Seconds since this process was started; 0 where there is no /proc."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as stat, open("/proc/uptime", encoding="ascii") as uptime:
            start_ticks = int(stat.read().rpartition(")")[2].split()[19])
            return float(uptime.read().split()[0]) - start_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
