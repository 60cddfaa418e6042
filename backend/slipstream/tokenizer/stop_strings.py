"""Matches stop strings in streamed text; text that may be the beginning of a stop string is held back.

Standard library only; one matcher belongs to one sequence. The result does not depend on how the text is cut into
deltas: the stop string that is complete first ends the text; of two complete at the same character, the longer one.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.word_automaton import ROOT, WordAutomaton


class StopMatcher:
    """`push` takes text and returns the text that is final. After a match, `matched` is the stop string.

    num_held: characters held back at the end of the text.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state", "_stops", "matched")

    def __init__(self, stops: Sequence[str], automaton: WordAutomaton, include_stop: bool = False) -> None:
        """stops: non-empty strings. automaton: built from stops. include_stop: the stop string is output too."""
        self._stops = stops
        self._automaton = automaton
        self._include = include_stop
        self._held = ""
        self._state = ROOT
        self.matched: str | None = None

    @property
    def num_held(self) -> int:
        return len(self._held)

    def push(self, text: str, may_match: bool = True) -> str:
        """Append text. Returns the held and new text that is now final.

        may_match False: stop strings complete within this text are ignored; one that begins in it may still end later.
        """
        if self.matched is not None or not text:
            return ""
        automaton = self._automaton
        self._state, num_taken = automaton.run(self._state, text, may_match)
        if num_taken >= 0:
            stop = self._stops[automaton.ends[self._state]]
            text, self._held, self.matched = self._held + text[:num_taken], "", stop
            return text if self._include else text[: len(text) - len(stop)]
        if self._held:
            text = self._held + text
        num_decided = len(text) - automaton.num_open[self._state]
        self._held = text[num_decided:]
        return text[:num_decided]

    def flush(self) -> str:
        """End the text. Returns the text that was held back."""
        text, self._held = self._held, ""
        return text
