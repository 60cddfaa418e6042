"""Which steps bring prefixes back from host memory, and which requests wait for theirs. Engine thread.

All streams of a step wait for its loads. So beside decodes a step makes a bounded number of them, and a request whose
prefix takes more of them starts when its last one is made. Loads are made in the order in which requests were admitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from slipstream.core.host_cache import HostCache
from slipstream.core.prefix import Prefix
from slipstream.core.request import Request


class HostLoads:
    """most_blocks: that a step loads beside other running requests; 1 or more."""

    def __init__(self, host: HostCache, most_blocks: float) -> None:
        self._host = host
        self._most = most_blocks
        self._left = math.inf  # of them, in the step being scheduled
        self._waiting: list[Request] = []

    def begin_step(self, num_running: int) -> list[Request]:
        """Allow the next loads. Returns the requests that need not wait any more. num_running: also those that wait."""
        host = self._host
        self._left = math.inf
        if num_running > len(self._waiting):
            self._left = self._most - host.allow_more(self._most)
        elif self._waiting:  # nobody else is kept waiting
            host.allow_to(self._waiting[0].last_load)
        ready = [request for request in self._waiting if host.may_load(request.last_load)]
        if ready:
            self._waiting = [request for request in self._waiting if not host.may_load(request.last_load)]
            for request in ready:
                request.awaits_loads = False
        return ready

    def must_wait(self, prefix: Prefix) -> bool:
        """Whether a request with this prefix starts in a later step than the one being scheduled."""
        num_loads = prefix.num_hosted
        is_behind = num_loads > 0 and not self._host.may_load(self._host.last_load)
        return is_behind or num_loads > self._left or not self._host.may_load(self._shared_load(prefix))

    def take(self, request: Request, prefix: Prefix, copies: Sequence[tuple[int, int]]) -> None:
        """Queue the loads of an admitted request's prefix. copies: reserved host blocks and what they are loaded to."""
        must_wait = self.must_wait(prefix)
        request.last_load = self._shared_load(prefix)
        for host_block, block in copies:
            self._host.load(host_block, block)
        if copies:
            request.last_load = self._host.last_load
        if must_wait:
            request.awaits_loads = True
            self._waiting.append(request)
            self._left -= self._host.allow_more(self._left)
        else:
            self._host.allow_to(request.last_load)
            self._left -= len(copies)

    def forget(self, request: Request) -> None:
        """The request's blocks are released; what was queued still comes, for others."""
        if request.awaits_loads:
            request.awaits_loads = False
            self._waiting.remove(request)

    def _shared_load(self, prefix: Prefix) -> int:
        """The last load that another request has queued for this prefix, 0 without one."""
        return self._host.last_load_of(prefix.on_device()) if self._host.has_loads else 0
