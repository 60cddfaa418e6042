"""In which order requests are served and preempted, and when those that wait or run too long end. Engine thread only.

Ageing: a waiting request gains one level of priority every `aging_s` seconds. All that wait age alike, so the order of
two requests never changes while they wait: it is that of arrival + priority * aging_s, known on arrival. Nothing is
sorted again, and the rule costs no step anything. A request that has aged keeps its place when it runs or is preempted.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from slipstream.core.request import Request

MAX_AGED_LEVELS = 100  # priorities below -100 and above 100 age as these do, so that every wait has a bound
_MIN_COMPACTED = 64

SortKey = tuple[float, int]


def sort_key(priority: int, number: int, now: float, aging_s: float) -> SortKey:
    """Lower is served first. number: the order of arrival. aging_s: 0 switches ageing off.

    A request is overtaken only by requests that arrive less than (its level - theirs) * aging_s seconds after it.
    """
    if aging_s <= 0:
        return priority, number
    level = min(max(priority, -MAX_AGED_LEVELS), MAX_AGED_LEVELS)
    return now + level * aging_s, number


def expiry_of(request: Request) -> float:
    """time.monotonic() at which a request times out; queue_deadline is None once it has been started."""
    deadline, queue_deadline = request.deadline, request.queue_deadline
    return min(
        float("inf") if deadline is None else deadline, float("inf") if queue_deadline is None else queue_deadline
    )


class ExpiryQueue:
    """Requests by their expiry. O(log n) for each, however many wait.

    An entry is checked when its time comes: the request may have ended, or been started before its queue deadline.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._max_entries = _MIN_COMPACTED

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        expiry = expiry_of(request)
        if expiry == float("inf"):
            return
        heappush(self._heap, (expiry, request.request_id, request))
        if len(self._heap) > self._max_entries:  # ended requests must not be kept until their deadline
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapify(self._heap)
            self._max_entries = max(_MIN_COMPACTED, 2 * len(self._heap))

    def pop(self, now: float) -> list[Request]:
        """Take out the requests that have expired, the first to expire first."""
        expired: list[Request] = []
        while self._heap and self._heap[0][0] <= now:
            request = heappop(self._heap)[2]
            if request.is_finished:
                continue
            if expiry_of(request) <= now:
                expired.append(request)
            else:
                self.add(request)
        return expired
