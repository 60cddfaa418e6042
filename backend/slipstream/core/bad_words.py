"""Bad words of several tokens: the tokens that must not follow the output so far.

Standard library only; immutable once built, shared by threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slipstream.core.word_automaton import WordAutomaton


class BadWords:
    """Automaton over bad words without their last token. Its state starts at word_automaton.ROOT."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        """words: token ids; words of one token are skipped, because they are banned everywhere."""
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
