"""Stop strings over streamed text: what could be the beginning of one is held back until it is decided.

Standard library only; one matcher belongs to one sequence. The outcome does not depend on how the text is cut into
pieces: characters are taken one after the other, the stop string that is complete first ends the text, and of two that
are complete at the same character the longer one does.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """push text; the text that is decided comes back. After a match `matched` is the stop string and nothing follows.

    num_held: characters at the end of the text so far that are held back.
    """

    __slots__ = ("_held", "_include", "_inner", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """stops: non-empty strings. include_stop: the stop string itself is given out as well."""
        self._stops = tuple(stops)
        self._include = include_stop
        self._held = ""
        self._inner = frozenset("".join(stop[:-1] for stop in stops))  # characters that a held text may end with
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
        num_known = len(self._held)
        text = self._held + text
        end, stop = self._first_match(text, num_known) if may_match else (0, None)
        if stop is not None:
            self.matched, self._held = stop, ""
            return text[:end] if self._include else text[: end - len(stop)]
        num_held = self._num_open(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """The text has ended: what was held is no stop string."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str, num_known: int) -> tuple[int, str | None]:
        """The end and the text of the first stop string that is complete after num_known characters."""
        best_end, best = len(text) + 1, None
        for stop in self._stops:
            start = text.find(stop, max(0, num_known - len(stop) + 1))
            if start < 0:
                continue
            end = start + len(stop)
            if end < best_end or (end == best_end and best is not None and len(stop) > len(best)):
                best_end, best = end, stop
        return best_end, best

    def _num_open(self, text: str) -> int:
        """Length of the longest end of the text that begins some stop string."""
        if text[-1] not in self._inner:
            return 0
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
