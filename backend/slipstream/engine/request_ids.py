"""The handles of live requests by the ids that their clients gave them, of which several may be the same.

Standard library only; any thread.
"""

from __future__ import annotations

import threading


class RequestIds:
    """Knows what `stop: true` with an id refers to: the newest live request of that id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[str, dict[int, None]] = {}  # by id, the newest last
        self._ids: dict[int, str] = {}  # by handle

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, handle: int, request_id: str) -> None:
        """Nothing happens without an id."""
        if request_id:
            with self._lock:
                self._ids[handle] = request_id
                self._handles.setdefault(request_id, {})[handle] = None

    def newest(self, request_id: str) -> int | None:
        with self._lock:
            return next(reversed(self._handles.get(request_id, {})), None)

    def remove(self, handle: int) -> None:
        """An unknown handle is ignored."""
        with self._lock:
            request_id = self._ids.pop(handle, None)
            if request_id is None:
                return
            handles = self._handles[request_id]
            del handles[handle]
            if not handles:
                del self._handles[request_id]
