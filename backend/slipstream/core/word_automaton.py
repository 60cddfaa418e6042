"""Which of many words ends after each symbol of a text, at a cost that the number of words does not change.

Standard library only; immutable once built, shared by threads. A symbol is a character (stop strings) or a token id
(stop and bad words as ids). Source: Aho and Corasick, CACM 18 (1975).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

S = TypeVar("S", bound=Hashable)

ROOT = 0


class WordAutomaton(Generic[S]):
    """A state is what the end of the text so far has in common with the words; ROOT is nothing.

    ends[state]: the index of the longest word that ends here, -1 if none does; of equal words the first.
    num_open[state]: length of the longest end of the text that begins a word and may still become it.
    suffixes[state]: the state of the next shorter end of the text that begins a word.
    """

    __slots__ = ("_children", "_word_states", "ends", "num_open", "suffixes")

    def __init__(self, words: Iterable[Sequence[S]]) -> None:
        """words: none of them empty. Building takes about a microsecond per symbol, a step then a dictionary access."""
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
        """Take symbols up to the first after which a word ends: the state there, and how many were taken.

        Without may_end all are taken. How many is -1 when no word has ended.
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
        """Indices of all words that end here, the longest first; of equal words the first."""
        found: list[int] = []
        index = self.ends[state]
        while index >= 0:
            found.append(index)
            index = self.ends[self.suffixes[self._word_states[index]]]
        return found

    def _link(self) -> None:
        """Suffixes by breadth: those of a state's children follow from its own."""
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
