"""Order in which requests are served and preempted, and the queue of their deadlines. Engine thread only.

Ageing: a waiting request gains one priority level every `aging_s` seconds. All waiting requests age equally, so their
order is that of arrival + priority * aging_s, a constant known on arrival, and no step sorts the queue. A request keeps
its key when it runs or is preempted.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from slipstream.core.request import Request

MAX_AGED_LEVELS = 100  # priorities are clamped to -100..100, which bounds every wait
_MIN_COMPACTED = 64

SortKey = tuple[float, ...]


def sort_key(priority: int, number: int, now: float, aging_s: float) -> SortKey:
    """Lower is served first. number: the order of arrival. aging_s: 0 disables ageing.

    A request is overtaken only by requests that arrive less than (its level - theirs) * aging_s seconds after it.
    """
    if aging_s <= 0:
        return priority, number
    level = min(max(priority, -MAX_AGED_LEVELS), MAX_AGED_LEVELS)
    return now + level * aging_s, number


def next_key(last: SortKey, number: int) -> SortKey:
    """The key of what goes on where a request with key `last` has ended: before all that came after that."""
    return *last[:2], number


def expiry_of(request: Request) -> float:
    """time.monotonic() at which a request times out; queue_deadline is None once it has started."""
    deadline, queue_deadline = request.deadline, request.queue_deadline
    return min(
        float("inf") if deadline is None else deadline, float("inf") if queue_deadline is None else queue_deadline
    )


class ExpiryQueue:
    """Heap of the requests' expiries, O(log n) per request.

    An entry is checked when it expires: the request may have started before its queue deadline. What has ended leaves
    its two numbers at most, because a request may hold much memory and its deadline may be far.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # expiry, sequence id
        self._requests: dict[int, Request] = {}  # that have not ended, by sequence id
        self._max_entries = _MIN_COMPACTED

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        expiry = expiry_of(request)
        if expiry == float("inf"):
            return
        self._requests[request.sequence_id] = request
        heappush(self._heap, (expiry, request.sequence_id))
        if len(self._heap) > self._max_entries:  # drop ended requests before their deadline
            self._heap = [entry for entry in self._heap if entry[1] in self._requests]
            heapify(self._heap)
            self._max_entries = max(_MIN_COMPACTED, 2 * len(self._heap))

    def discard(self, request: Request) -> None:
        """The request has ended."""
        self._requests.pop(request.sequence_id, None)

    def pop(self, now: float) -> list[Request]:
        """Remove and return the expired requests, earliest first."""
        expired: list[Request] = []
        while self._heap and self._heap[0][0] <= now:
            request = self._requests.pop(heappop(self._heap)[1], None)
            if request is None:
                continue
            if expiry_of(request) <= now:
                expired.append(request)
            else:
                self.add(request)
        return expired
