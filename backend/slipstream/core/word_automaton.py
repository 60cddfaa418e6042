"""Matches many words in a stream of symbols; the cost per symbol does not depend on the number of words.

Standard library only; immutable once built, shared by threads. A symbol is a character (stop strings) or a token id
(stop and bad words as ids). Source: Aho and Corasick, CACM 18 (1975).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

S = TypeVar("S", bound=Hashable)

ROOT = 0


class WordAutomaton(Generic[S]):
    """A state is the longest suffix of the text that is a prefix of a word; ROOT is the empty one.

    ends[state]: index of the longest word that ends here (the first of equal words), -1 if none does.
    num_open[state]: length of the longest suffix of the text that is a proper prefix of a word.
    suffixes[state]: the state of the next shorter suffix of the text that is a prefix of a word.
    """

    __slots__ = ("_children", "_word_states", "ends", "num_open", "suffixes")

    def __init__(self, words: Iterable[Sequence[S]]) -> None:
        """words: not empty. Building takes about 1 us per symbol, a step one dictionary access."""
        children: list[dict[S, int]] = [{}]
        ends: dict[int, int] = {}
        self._word_states: list[int] = []
        for index, word in enumerate(words):
            state = ROOT
            for symbol in word:
                following = children[state].get(symbol)
                if following is None:
                    following = children[state][symbol] = len(children)
                    children.append({})
                state = following
            ends.setdefault(state, index)
            self._word_states.append(state)
        self._children = children
        self.ends = [ends.get(state, -1) for state in range(len(children))]
        self.suffixes = [ROOT] * len(children)
        self.num_open = [0] * len(children)
        self._link()

    def step(self, state: int, symbol: S) -> int:
        """The state after one more symbol."""
        following = self._children[state].get(symbol)
        while following is None and state:
            state = self.suffixes[state]
            following = self._children[state].get(symbol)
        return following or ROOT

    def run(self, state: int, symbols: Sequence[S], may_end: bool = True) -> tuple[int, int]:
        """Consume symbols until a word ends. Returns the state and the number of symbols consumed, -1 if no word ended.

        may_end False: consume all symbols.
        """
        children, suffixes, ends = self._children, self.suffixes, self.ends
        for index, symbol in enumerate(symbols):
            following = children[state].get(symbol)
            while following is None and state:
                state = suffixes[state]
                following = children[state].get(symbol)
            state = following or ROOT
            if may_end and ends[state] >= 0:
                return state, index + 1
        return state, -1

    def all_ends(self, state: int) -> list[int]:
        """Indices of all words that end here, longest first (the first of equal words)."""
        found: list[int] = []
        index = self.ends[state]
        while index >= 0:
            found.append(index)
            index = self.ends[self.suffixes[self._word_states[index]]]
        return found

    def _link(self) -> None:
        """Compute suffixes breadth first: those of the children follow from the parent's."""
        suffixes, children_of, ends, num_open = self.suffixes, self._children, self.ends, self.num_open
        level, depth = list(children_of[ROOT].values()), 1
        while level:
            following: list[int] = []
            for state in level:
                shorter = suffixes[state]
                num_open[state] = depth if children_of[state] else num_open[shorter]
                if ends[state] < 0:
                    ends[state] = ends[shorter]
                for symbol, child in children_of[state].items():
                    suffixes[child] = self.step(shorter, symbol)
                    following.append(child)
            level, depth = following, depth + 1


NO_WORDS: WordAutomaton[Any] = WordAutomaton(())  # most requests have none: they share this
