"""The folder that a gateway's processes share in the temporary directory, and the end of those that nobody uses.

Every process of a gateway holds a shared lock of the folder's file `lock`; the kernel gives it back however the process
ends. A folder whose lock is free was left by gateways that were killed, and the next gateway of the same user removes
it. A folder without the file is left alone: it may be that of an earlier version, which has no lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "slipstream-gateway-"
LOCK = "lock"


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A new folder for this user alone, until the block ends. Removes abandoned ones first."""
    remove_abandoned(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = _make_lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def hold(folder: Path) -> None:
    """Keep another gateway from removing the folder while this process runs, also after its parent has been killed."""
    with suppress(OSError):  # no lock file: the file system has no locks, and nobody removes the folder
        fcntl.flock(os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW), fcntl.LOCK_SH)


def remove_abandoned(parent: Path) -> None:
    """Remove this user's folders there that no process holds."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # gone meanwhile, without a lock, or held
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                _remove_unless_held(folder)


def _make_lock(folder: Path) -> int | None:
    """It has its name only once it is held, so that no other gateway finds it free. None if locks are not supported."""
    lock = os.open(folder / f"{LOCK}.new", os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError:
        os.close(lock)
        return None
    (folder / f"{LOCK}.new").rename(folder / LOCK)
    return lock


def _remove_unless_held(folder: Path) -> None:
    """Raises OSError for one that is held or has no lock."""
    lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
