"""Answers of the Responses API that are kept for `previous_response_id` and GET, for a bounded time and size.

A file each, in a folder of the gateway's own that all workers share and that goes with it. When the folder is full, the
oldest answer of whoever keeps the most goes first, so that one API key cannot drive out another's. To look through
thousands of files takes 10 ms or more, so a worker looks when it has used up the room that its last look left it: of
the limits a sixteenth, divided among the workers. Any thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MAX_STORED_RESPONSES = 4096  # files that a new one looks through
MAX_STORED_RESPONSE_BYTES = 256 << 10  # of one, its conversation included: a short request loads it
_PARTS = 16  # of the limits; one is left free for what the workers write between two looks
_LEAST_ROOM_BYTES = 16 << 10  # with less a worker looks each time
logger = logging.getLogger(__name__)


class ResponseStore:
    """folder: None keeps nothing. owner: whoever may read an answer again, such as an API key's digest. num_workers:
    that write to the folder."""

    def __init__(self, folder: Path | None, max_bytes: int, ttl_s: float, num_workers: int = 1) -> None:
        self._folder = folder if max_bytes > 0 and ttl_s > 0 else None
        self._max_bytes, self._ttl_s, self._num_workers = max_bytes, ttl_s, num_workers
        self._has_warned = False
        self._lock = threading.Lock()
        self._room = _Room(0, 0)  # what may be written before the next look

    @property
    def keeps(self) -> bool:
        return self._folder is not None

    def put(self, owner: bytes, body: dict[str, Any], messages: list[dict[str, Any]]) -> bool:
        """messages: of the conversation, the answer's included. False: not kept, as too large or not writable."""
        if self._folder is None:
            return False
        data = json.dumps({"body": body, "messages": messages}).encode()
        if len(data) > min(MAX_STORED_RESPONSE_BYTES, self._max_bytes):
            return False
        try:
            self._write(self._path(owner, body["id"]), data)
        except OSError as error:  # the answer itself is finished and good
            if not self._has_warned:
                logger.warning("answers of /v1/responses are not kept: %s", error)
            self._has_warned = True
            return False
        return True

    def get(self, owner: bytes, response_id: str) -> dict[str, Any] | None:
        """{"body", "messages"}, or None if it was never kept, or no longer."""
        if self._folder is None:
            return None
        path = self._path(owner, response_id)
        try:
            if time.time() - path.stat().st_mtime > self._ttl_s:
                path.unlink()
                return None
            return json.loads(path.read_bytes())
        except FileNotFoundError:
            return None

    def delete(self, owner: bytes, response_id: str) -> bool:
        if self._folder is None:
            return False
        try:
            self._path(owner, response_id).unlink()
        except FileNotFoundError:
            return False
        return True

    def _path(self, owner: bytes, response_id: str) -> Path:
        """Clients choose ids, so a name is a hash of one; and a wrong owner finds nothing."""
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(owner).hexdigest()}-{hashlib.sha256(response_id.encode()).hexdigest()}"

    def _write(self, path: Path, data: bytes) -> None:
        """Raises OSError, and leaves no part of a file."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # what cleans /tmp may have removed it
        self._make_room(path.name, len(data))
        written = path.with_suffix(f".{time.monotonic_ns()}")
        try:
            written.write_bytes(data)
            written.replace(path)
        except OSError:
            with suppress(OSError):
                written.unlink()
            raise

    def _make_room(self, name: str, num_bytes: int) -> None:
        with self._lock:
            room = self._room
            if room.num_bytes >= num_bytes and room.num_answers > 0:
                self._room = _Room(room.num_bytes - num_bytes, room.num_answers - 1)
            else:
                self._drop_for(name, num_bytes)
                self._room = self._free_room()

    def _free_room(self) -> _Room:
        """A worker's part of what a look leaves free."""
        parts = _PARTS * self._num_workers
        num_bytes = self._max_bytes // parts
        return _Room(num_bytes if num_bytes >= _LEAST_ROOM_BYTES else 0, MAX_STORED_RESPONSES // parts)

    def _drop_for(self, name: str, num_bytes: int) -> None:
        """Drop what is too old, then the oldest answers of whoever has the largest share, until the new one fits."""
        shares: defaultdict[str, _Share] = defaultdict(_Share)
        oldest = time.time() - self._ttl_s
        for kept in self._found():
            if kept.modified < oldest:
                _remove(kept.path)
            else:
                shares[_owner(os.path.basename(kept.path))].add(kept)
        shares[_owner(name)].num_bytes += num_bytes
        shares[_owner(name)].count += 1
        while not self._fits(shares.values()):
            largest = max((one for one in shares.values() if one.kept), key=self._part, default=None)
            if largest is None:
                return
            largest.drop_oldest()

    def _found(self) -> list[_Kept]:
        """All that is kept, the newest first."""
        assert self._folder is not None
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another worker was faster
                    status = entry.stat()
                    found.append(_Kept(status.st_mtime, status.st_size, entry.path))
        return sorted(found, key=lambda kept: kept.modified, reverse=True)

    def _fits(self, shares: Collection[_Share]) -> bool:
        total, count = sum(one.num_bytes for one in shares), sum(one.count for one in shares)
        free, workers = self._free_room(), self._num_workers
        return (
            total <= self._max_bytes - free.num_bytes * workers
            and count <= MAX_STORED_RESPONSES - free.num_answers * workers
        )

    def _part(self, share: _Share) -> float:
        """The part that is taken of the limit that it is nearer to."""
        return max(share.num_bytes / self._max_bytes, share.count / MAX_STORED_RESPONSES)


def _owner(name: str) -> str:
    return name.partition("-")[0]


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


class _Room(NamedTuple):
    num_bytes: int
    num_answers: int


class _Kept(NamedTuple):
    modified: float
    num_bytes: int
    path: str


@dataclass
class _Share:
    """What one owner keeps, the newest first, and the new answer if it is its."""

    kept: list[_Kept] = field(default_factory=list)
    num_bytes: int = 0
    count: int = 0

    def add(self, kept: _Kept) -> None:
        self.kept.append(kept)
        self.num_bytes, self.count = self.num_bytes + kept.num_bytes, self.count + 1

    def drop_oldest(self) -> None:
        dropped = self.kept.pop()
        _remove(dropped.path)
        self.num_bytes, self.count = self.num_bytes - dropped.num_bytes, self.count - 1
