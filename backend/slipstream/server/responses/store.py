"""Answers of the Responses API that are kept for `previous_response_id` and GET, for a bounded time and size.

A file each, in a folder of the gateway's own that all workers share and that goes with it. Any thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_STORED_RESPONSES = 4096  # files that a new one looks through
MAX_STORED_RESPONSE_BYTES = 256 << 10  # of one, its conversation included: a short request loads it
logger = logging.getLogger(__name__)


class ResponseStore:
    """folder: None keeps nothing. owner: whoever may read an answer again, such as an API key's digest."""

    def __init__(self, folder: Path | None, max_bytes: int, ttl_s: float) -> None:
        self._folder = folder if max_bytes > 0 and ttl_s > 0 else None
        self._max_bytes, self._ttl_s = max_bytes, ttl_s
        self._has_warned = False

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
        name = hashlib.sha256(len(owner).to_bytes(4, "little") + owner + response_id.encode()).hexdigest()
        return self._folder / name

    def _write(self, path: Path, data: bytes) -> None:
        """Raises OSError, and leaves no part of a file."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # what cleans /tmp may have removed it
        self._make_room(len(data))
        written = path.with_suffix(f".{time.monotonic_ns()}")
        try:
            written.write_bytes(data)
            written.replace(path)
        except OSError:
            with suppress(OSError):
                written.unlink()
            raise

    def _make_room(self, num_bytes: int) -> None:
        """Drop what is too old, then the oldest, until the new one fits."""
        assert self._folder is not None
        found = []
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another worker was faster
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        found.sort()
        total, count, oldest = sum(size for _, size, _ in found), len(found), time.time() - self._ttl_s
        for modified, size, path in found:
            fits = total + num_bytes <= self._max_bytes and count < MAX_STORED_RESPONSES
            if modified >= oldest and fits:
                return
            path.unlink(missing_ok=True)
            total, count = total - size, count - 1
