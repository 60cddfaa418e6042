"""The folder of the file in which ranks of a machine meet (process_group.file_store), for this user only.

An engine that is killed leaves its folder, so the next one removes those whose lock nobody holds: the kernel gives up
the lock with the process. Engine thread.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "slipstream-ranks-"
_LOCK = "lock"


class MeetingFolder:
    def __init__(self) -> None:
        _remove_left()
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX)  # removed also at the end of a process without close
        made = Path(self._folder.name) / "made"
        self._lock = made.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        made.rename(made.with_name(_LOCK))  # only now: nobody sees it without its owner

    @property
    def store_path(self) -> str:
        return f"{self._folder.name}/store"

    def close(self) -> None:
        """Any number of times."""
        self._folder.cleanup()
        self._lock.close()


def _remove_left() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is another user's, is being made, or has an owner
            if folder.lstat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
