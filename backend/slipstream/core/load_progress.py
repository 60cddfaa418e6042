"""What a rank has done of a load: the thread that loads notes it, others look whether it still goes on.

Standard library only.
"""

from __future__ import annotations

import resource
from pathlib import Path

_IO = Path("/proc/self/io")
_READ = "read_bytes:"


class LoadProgress:
    """last: what was done last. One thread notes, any other may ask."""

    def __init__(self) -> None:
        self.last = ""
        self._num_done = 0

    def note(self, done: str) -> None:
        self.last = done
        self._num_done += 1

    @property
    def mark(self) -> str:
        """Another one when something was done, when the process has read from a disk, as a large tensor may take long,
        or when one that it has started has ended: the first start compiles kernels one after another."""
        of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return f"{self._num_done} {_bytes_read()} {of_children.ru_utime + of_children.ru_stime}"


def _bytes_read() -> int:
    """By this process, from disks and network file systems; 0 where the kernel does not count."""
    try:
        lines = _IO.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.removeprefix(_READ)) for line in lines if line.startswith(_READ)), 0)
