"""The channels of gpt-oss's answers: reasoning, calls of functions, text for the user."""

from __future__ import annotations

from slipstream.server.tools.json_call import CallArguments, CallStart, Content, Event, Reasoning
from slipstream.server.tools.parsers import pieces

_FUNCTIONS, _RECIPIENT = "functions.", " to="
_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")


class HarmonyParser:
    """Messages of channels: `analysis` is reasoning, one for `functions.name` a call, and the others are content, as
    text without channels."""

    def __init__(self) -> None:
        self._text = ""
        self._role, self._header = "", ""  # of the message: what stands before and behind <|channel|>
        self._mark = ""  # the last one
        self._channel, self._is_call = "", False
        self._is_plain = False

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for piece in pieces(text):
            self._feed(piece, events)
        return events

    def _feed(self, text: str, events: list[Event]) -> None:
        self._text += text
        while (found := self._next_mark()) is not None:
            place, mark = found
            self._take(self._text[:place], events)
            self._text = self._text[place + len(mark) :]
            self._turn(mark, events)
        ready = len(self._text) - max(_num_held(self._text, mark) for mark in _MARKS)
        self._take(self._text[:ready], events)
        self._text = self._text[ready:]

    def finish(self) -> list[Event]:
        events: list[Event] = []
        self._take(self._text, events)
        if not self._mark and self._header:
            events.append(Content(self._header))
        self._text = self._header = ""
        return events

    def _next_mark(self) -> tuple[int, str] | None:
        places = [(place, mark) for mark in _MARKS if (place := self._text.find(mark)) >= 0]
        return min(places) if places else None

    def _turn(self, mark: str, events: list[Event]) -> None:
        if mark == "<|message|>":
            words = self._header.replace("<|constrain|>", " ").split()
            self._channel = words[0] if words else ""
            recipient = next((word[3:] for word in (*self._role.split(), *words) if word.startswith("to=")), "")
            self._is_call = recipient.startswith(_FUNCTIONS)
            if self._is_call:
                events.append(CallStart(recipient.removeprefix(_FUNCTIONS)))
        elif mark == "<|start|>":
            self._role, self._header = "", ""
        elif mark == "<|channel|>":
            self._role, self._header = self._header, ""
        self._mark = mark

    def _take(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        if not self._mark:
            self._take_first(text, events)
        elif self._mark != "<|message|>":
            self._header += text
        elif self._is_call:
            events.append(CallArguments(text))
        else:
            events.append(Reasoning(text) if self._channel == "analysis" else Content(text))

    def _take_first(self, text: str, events: list[Event]) -> None:
        """Text before any mark: the recipient of a call, as the prompt ends with the role, or plain content."""
        self._header += text
        if self._is_plain or not (_RECIPIENT.startswith(self._header) or self._header.startswith(_RECIPIENT)):
            events.append(Content(self._header))
            self._is_plain, self._header = True, ""


def _num_held(text: str, mark: str) -> int:
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
