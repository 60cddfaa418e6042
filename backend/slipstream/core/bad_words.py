"""Bad words of several tokens: the tokens that must not follow the output so far.

Standard library only; immutable once built, shared by threads.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from slipstream.core.word_automaton import WordAutomaton


class BadWords:
    """Automaton over bad words without their last token. Its state starts at word_automaton.ROOT."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        """words: token ids; words of one token are banned everywhere, in any state."""
        lasts: dict[tuple[int, ...], list[int]] = {}
        alone: set[int] = set()
        for word in words:
            if len(word) > 1:
                lasts.setdefault(tuple(word[:-1]), []).append(word[-1])
            else:
                alone.update(word)
        self._alone = array("i", sorted(alone))
        self._lasts = list(map(sorted, lasts.values()))
        self._automaton = WordAutomaton(lasts)

    def step(self, state: int, token_id: int) -> int:
        """The state after one more token."""
        return self._automaton.step(state, token_id)

    def banned(self, state: int) -> list[int]:
        """The tokens that would complete a bad word of several tokens."""
        found = self._automaton.all_ends(state)
        return sorted({token_id for index in found for token_id in self._lasts[index]})

    def bans(self, state: int, token_id: int) -> bool:
        """Whether a token would complete a bad word, or is one."""
        ends = self._automaton.all_ends(state)
        return holds(self._alone, token_id) or any(holds(self._lasts[index], token_id) for index in ends)


def holds(ordered: Sequence[int], token_id: int) -> bool:
    """Whether a token is among sorted ones, which take 4 bytes each in an array and 40 or more in a set."""
    index = bisect_left(ordered, token_id)
    return index < len(ordered) and ordered[index] == token_id
