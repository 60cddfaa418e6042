"""Matches many words in a stream of symbols; the cost per symbol hardly depends on the number of words.

Standard library only; immutable once built, shared by threads. A symbol is a token id (stop and bad words as ids) or a
character's code point (stop strings). Source: Aho and Corasick, CACM 18 (1975).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

ROOT = 0

_Words = list[tuple[tuple[int, ...], int]]  # sorted, with the index of each


class WordAutomaton:
    """A state is the longest suffix of the text that is a prefix of a word; ROOT is the empty one.

    ends[state]: index of the longest word that ends here (the first of equal words), -1 if none does.
    num_open[state]: length of the longest suffix of the text that is a proper prefix of a word.
    suffixes[state]: the state of the next shorter suffix of the text that is a prefix of a word.

    A waiting request keeps its automata, with up to 16,384 states a list and more where texts become ids. So a state
    takes 20 bytes; a dictionary for each took 300. States are numbered breadth first, siblings by their last symbol:
    the children of a state are those from _first_child[state] up to _first_child[state + 1], found by bisection of
    _symbols. Most text is at ROOT, which may have 1,024 children: a dictionary finds these.
    """

    __slots__ = ("_first_child", "_root", "_symbols", "_word_states", "ends", "num_open", "suffixes")

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        """words: not empty. Building takes about 1 us per symbol, a step one dictionary access or bisection."""
        self._root: dict[int, int] = {}
        self._symbols, self._first_child = array("i", [-1]), array("i")
        self.suffixes, self.ends, self.num_open = array("i", [ROOT]), array("i"), array("i")
        ordered = sorted((tuple(word), index) for index, word in enumerate(words))
        self._word_states = array("i", [ROOT]) * len(ordered)
        level, depth = [(0, len(ordered))], 0  # by state of this depth: the words that begin with it are a range
        while level:
            following: list[tuple[int, int]] = []
            for start, end in level:
                start = self._complete_state(ordered, start, end, depth)
                while start < end:
                    first, start = start, self._add_child(ordered, start, end, depth)
                    following.append((first, start))
            level, depth = following, depth + 1
        self._first_child.append(len(self._symbols))

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> WordAutomaton:
        """The automaton for `run`."""
        return cls([*map(ord, text)] for text in texts)

    def step(self, state: int, symbol: int) -> int:
        """The state after one more symbol."""
        symbols, first_child = self._symbols, self._first_child
        while state:
            end = first_child[state + 1]
            child = bisect_left(symbols, symbol, first_child[state], end)
            if child < end and symbols[child] == symbol:
                return child
            state = self.suffixes[state]
        return self._root.get(symbol, ROOT)

    def run(self, state: int, text: str, may_end: bool = True) -> tuple[int, int]:
        """Consume text until a word ends. Returns the state and the number of characters consumed, -1 if no word ended.

        may_end False: consume all of it.
        """
        symbols, first_child, suffixes, ends = self._symbols, self._first_child, self.suffixes, self.ends
        for index, symbol in enumerate(map(ord, text)):
            while state:  # `step`, without a call for each character
                end = first_child[state + 1]
                child = bisect_left(symbols, symbol, first_child[state], end)
                if child < end and symbols[child] == symbol:
                    break
                state = suffixes[state]
            else:
                child = self._root.get(symbol, ROOT)
            state = child
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

    def _complete_state(self, words: _Words, start: int, end: int, depth: int) -> int:
        """Complete the next state, with which words[start:end] begin. Returns the start of the longer ones."""
        state, longer = len(self.ends), start
        suffix = self.suffixes[state]
        while longer < end and len(words[longer][0]) == depth:
            self._word_states[words[longer][1]] = state
            longer += 1
        shorter_end, shorter_open = (self.ends[suffix], self.num_open[suffix]) if state else (-1, 0)
        self.ends.append(words[start][1] if longer > start else shorter_end)
        self.num_open.append(depth if longer < end else shorter_open)
        self._first_child.append(len(self._symbols))
        return longer

    def _add_child(self, words: _Words, start: int, end: int, depth: int) -> int:
        """Add a child, with which words[start] begins, to the state completed last. Returns the end of its words.

        Its suffix is a child of a state of less depth: `step` works up to those.
        """
        symbol = words[start][0][depth]
        while start < end and words[start][0][depth] == symbol:
            start += 1
        if depth:
            self.suffixes.append(self.step(self.suffixes[len(self.ends) - 1], symbol))
        else:
            self._root[symbol] = len(self._symbols)
            self.suffixes.append(ROOT)
        self._symbols.append(symbol)
        return start


NO_WORDS = WordAutomaton(())  # most requests have none: they share this
