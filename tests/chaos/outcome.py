"""What came back for one request, and whether that may be."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asked import BY_SERVER, WHOLE, Asked


@dataclass
class Outcome:
    """texts: of each sequence. num_finals: terminal answers. was_cut: the client ended it. is_overdue: it gave up."""

    asked: Asked
    sent: float = field(default_factory=time.monotonic)
    first: float = 0.0
    ended: float = 0.0
    texts: list[str] = field(default_factory=list)
    num_finals: int = 0
    num_responses: int = 0
    error: str = ""
    was_cut: bool = False
    is_overdue: bool = False

    def add(self, sequence: int, text: str) -> None:
        while len(self.texts) <= sequence:
            self.texts.append("")
        self.texts[sequence] += text

    def received(self) -> None:
        self.first = self.first or time.monotonic()
        self.num_responses += 1

    def cut(self) -> None:
        """The client went: nothing is owed to it."""
        self.was_cut = True
        self.end("")

    def end(self, error: str) -> None:
        self.error, self.ended = error, time.monotonic()

    @property
    def kind(self) -> str:
        """A column of the report."""
        if self.was_cut:
            return "cut by the client"
        if self.error:
            return "error"
        return "answered" if self.asked.ending == WHOLE else "ended by the server"


def fault_of(outcome: Outcome, known_texts: Sequence[str], is_explained: bool) -> str:
    """Why this must not be; "" when all is well.  is_explained: an error that a failure of the engine accounts for."""
    asked = outcome.asked
    if outcome.is_overdue:
        return f"no terminal answer: {outcome.error}"
    if outcome.error:
        return "" if is_explained else f"an error that nothing explains: {outcome.error[:400]}"
    if not outcome.was_cut and outcome.num_finals != 1:
        return f"{outcome.num_finals} terminal answers"
    is_whole = asked.ending in (WHOLE, "slow reader", "cancel at the last") and not outcome.was_cut
    if is_whole and len(outcome.texts) != asked.known.num_sequences:
        return f"{len(outcome.texts)} sequences of {asked.known.num_sequences}"
    for text, known in zip(outcome.texts, known_texts):
        begun = text.rstrip("\N{REPLACEMENT CHARACTER}")  # a text may be cut inside a character
        if (text != known) if is_whole else not known.startswith(begun):
            return f"another text than in the quiet run: {text!r} instead of {known!r}"
    if not outcome.was_cut and asked.ending not in (WHOLE, "cancel at the last", *BY_SERVER) and not outcome.texts:
        return "ended without a text"
    return ""


Texts = Mapping[tuple[int, bool], Sequence[str]]  # (number in the catalogue, is a chat) -> its sequences' texts
