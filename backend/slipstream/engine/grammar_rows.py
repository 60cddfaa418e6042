"""Allocates the rows of the mask matrix to states, with a queue. Engine thread."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from slipstream.core.queue_order import SortKey
from slipstream.engine.grammar_state import GrammarState


class MaskRows:
    """rows_per_state: masks of the next token and of its drafts. num_states: max open states; further ones wait in the
    scheduler's order, whichever was compiled first."""

    def __init__(self, num_states: int, rows_per_state: int) -> None:
        self._all = range(0, num_states * rows_per_state, rows_per_state)
        self._free = deque(self._all)
        self._waiting: list[GrammarState] = []  # sorted by _order

    def reset(self) -> None:
        """Free all rows and empty the queue, for a new worker."""
        self._free = deque(self._all)
        self._waiting.clear()

    def wait(self, state: GrammarState) -> None:
        insort(self._waiting, state, key=_order)

    def leave(self, state: GrammarState) -> bool:
        """Remove a state from the queue. Returns whether it was waiting."""
        index = bisect_left(self._waiting, _order(state), key=_order)
        is_waiting = index < len(self._waiting) and self._waiting[index] is state
        if is_waiting:
            del self._waiting[index]
        return is_waiting

    def next(self) -> GrammarState | None:
        """Give free rows to the first waiting state and return it; None without free rows or waiting states."""
        if not self._free or not self._waiting:
            return None
        state = self._waiting.pop(0)
        state.row = self._free.popleft()
        return state

    def give_back(self, row: int) -> None:
        self._free.append(row)


def _order(state: GrammarState) -> tuple[SortKey, int]:
    return state.request.sort_key, state.state_id
