"""Bad words of several tokens: which tokens must not come next, given the output so far.

Standard library only; immutable once built, shared by threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slipstream.core.word_automaton import WordAutomaton


class BadWords:
    """A state (word_automaton.ROOT at first) is what the end of the output has in common with the words."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        """words: token ids; those of one token are passed over, they are banned whatever comes before."""
        lasts: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            if len(word) > 1:
                lasts.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lasts = list(lasts.values())
        self._automaton = WordAutomaton(lasts)

    def step(self, state: int, token_id: int) -> int:
        """The state after one more token."""
        return self._automaton.step(state, token_id)

    def banned(self, state: int) -> list[int]:
        """The tokens that would complete a bad word."""
        found = self._automaton.all_ends(state)
        return sorted({token_id for index in found for token_id in self._lasts[index]})
