"""The rows of the mask matrix: who has which, and who is next. Engine thread."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from slipstream.core.queue_order import SortKey
from slipstream.runtime.grammar_state import GuideState


class MaskRows:
    """rows_per_state: the token's mask and those behind its drafts. num_states: that are open at once; more wait, and
    the scheduler's order says for how long: the most urgent gets the next free rows, whichever was compiled first."""

    def __init__(self, num_states: int, rows_per_state: int) -> None:
        self._all = range(0, num_states * rows_per_state, rows_per_state)
        self._free = deque(self._all)
        self._waiting: list[GuideState] = []  # sorted by _order

    def reset(self) -> None:
        """All are free, and nobody waits: of another worker."""
        self._free = deque(self._all)
        self._waiting.clear()

    def wait(self, state: GuideState) -> None:
        insort(self._waiting, state, key=_order)

    def leave(self, state: GuideState) -> bool:
        """Wait no longer. Returns whether it did."""
        place = bisect_left(self._waiting, _order(state), key=_order)
        is_waiting = place < len(self._waiting) and self._waiting[place] is state
        if is_waiting:
            del self._waiting[place]
        return is_waiting

    def next(self) -> GuideState | None:
        """The one that gets the next free rows, and has them now; None while there are none, or nobody waits."""
        if not self._free or not self._waiting:
            return None
        state = self._waiting.pop(0)
        state.row = self._free.popleft()
        return state

    def give_back(self, row: int) -> None:
        self._free.append(row)


def _order(state: GuideState) -> tuple[SortKey, int]:
    return state.request.sort_key, state.state_id
