"""Usage of each API key, counted over all worker processes in one mapped file of a fixed size.

Each rate limit is one number, the theoretical arrival time of the generic cell rate algorithm, on the machine's
monotonic clock, which all processes share. Running sequences and reserved tokens are in a row per worker; the
replacement of a worker that died resets its row. Costs a few microseconds under a file lock per request, nothing per
token. Event loop thread.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.server.metrics import is_alive

MINUTE = 60.0  # seconds; also the burst: one minute's quota may be used at once
REQUESTS, TOKENS = 0, 1
_BYTES = 8


def make_ledger(path: Path, num_keys: int, num_workers: int) -> Path:
    path.write_bytes(bytes(_BYTES * (2 * num_keys + num_workers * (1 + 2 * num_keys))))
    return path


class Ledger:
    """path: as make_ledger made it, or None for a process on its own."""

    def __init__(self, num_keys: int, path: Path | None = None) -> None:
        self._num_keys = num_keys
        self._file = path.open("r+b") if path is not None else None
        if self._file is None:
            self._all = memoryview(bytearray(_BYTES * (4 * num_keys + 1))).cast("d")
        else:
            self._all = memoryview(mmap.mmap(self._file.fileno(), 0)).cast("d")
        self._rows = self._all[2 * num_keys :]
        self._row_size = 1 + 2 * num_keys  # the worker's process, sequences of each key, reserved tokens of each
        with self._locked():
            self._own = self._take_row()

    def _take_row(self) -> memoryview[float]:
        for start in range(0, len(self._rows), self._row_size):
            row = self._rows[start : start + self._row_size]
            if not is_alive(int(row[0])):
                row[0] = os.getpid()
                for index in range(1, self._row_size):
                    row[index] = 0.0
                return row
        raise RuntimeError("more workers than rows of the ledger")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._file is None:
            yield
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    # ---- rates

    def used(self, kind: int, key: int, limit: int) -> float:
        """The amount of `limit` per minute that is used now; may exceed it after a large answer."""
        return max(0.0, self._all[2 * key + kind] - time.monotonic()) * limit / MINUTE

    def use(self, kind: int, key: int, limit: int, count: int = 1) -> float:
        """Use `count` if the quota allows. Returns 0 if it was used, else the seconds until it could be."""
        cost = count * MINUTE / limit
        with self._locked():
            now = time.monotonic()
            until = max(now, self._all[2 * key + kind]) + cost
            if until - now > MINUTE + 1e-6:
                return until - now - MINUTE
            self._all[2 * key + kind] = until
        return 0.0

    def charge(self, kind: int, key: int, limit: int, count: int) -> None:
        """Use `count` even beyond the quota: it has been generated already and delays later requests."""
        with self._locked():
            until = max(time.monotonic(), self._all[2 * key + kind])
            self._all[2 * key + kind] = until + count * MINUTE / limit

    # ---- tokens that running requests may still cost

    def num_reserved(self, key: int) -> int:
        return int(sum(self._rows[1 + self._num_keys + key :: self._row_size].tolist()))

    def reserve(self, key: int, limit: int, count: int) -> float:
        """Reserve tokens if the quota allows, counting used and reserved ones. Returns 0 if they were reserved, else
        the seconds until the excess is recovered."""
        with self._locked():
            excess = self.used(TOKENS, key, limit) + self.num_reserved(key) + count - limit
            if excess > 1e-6:
                return excess * MINUTE / limit
            self._own[1 + self._num_keys + key] += count
        return 0.0

    def release(self, key: int, count: int) -> None:
        """Release reserved tokens: they have been charged, or will not be generated."""
        self._own[1 + self._num_keys + key] -= count

    # ---- sequences at once

    def num_sequences(self, key: int) -> int:
        return int(sum(self._rows[1 + key :: self._row_size].tolist()))

    def enter(self, key: int, count: int, limit: int) -> bool:
        """Count `count` starting sequences, unless there would be more than `limit` (0: no limit)."""
        with self._locked():
            if limit and self.num_sequences(key) + count > limit:
                return False
            self._own[1 + key] += count
        return True

    def leave(self, key: int, count: int) -> None:
        self._own[1 + key] -= count
