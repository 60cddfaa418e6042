"""Stop strings over streamed text: what could be the beginning of one is held back until it is decided.

Standard library only; one matcher belongs to one sequence. The outcome does not depend on how the text is cut into
pieces: characters are taken one after the other, the stop string that is complete first ends the text, and of two that
are complete at the same character the longer one does.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.word_automaton import ROOT, WordAutomaton


class StopMatcher:
    """push text; the text that is decided comes back. After a match `matched` is the stop string and nothing follows.

    num_held: characters at the end of the text so far that are held back.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state", "_stops", "matched")

    def __init__(self, stops: Sequence[str], automaton: WordAutomaton[str], include_stop: bool = False) -> None:
        """stops: non-empty strings, and their automaton. include_stop: the stop string itself is given out as well."""
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
        """Take more text; returns what is decided of it and of what was held.

        may_match: whether a stop string that is complete within this text ends it; one that begins here may end later.
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
        """The text has ended: what was held is no stop string."""
        text, self._held = self._held, ""
        return text
