"""Parsers of tool calls that a model writes as JSON objects: Hermes / Qwen, Llama 3; and what all parsers share.

A parser belongs to one answer: feed() takes text deltas, finish() the rest. Text that only looks like a call becomes
content. Marks may be split over tokens, so a possible beginning of one is held back. Lists of calls are in lists.py,
calls between other marks in marked.py, gpt-oss's channels in harmony.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from slipstream.server.tools.json_call import Content, Event, JsonCall

MAX_HEAD = 1024  # characters between the mark of a call and its arguments
_PIECE_CHARS = 4096


class ToolParser(Protocol):
    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


def pieces(text: str) -> Iterator[str]:
    """A parser may look at all the text that it has, and copy it, at each mark; and a model may repeat a mark, which is
    one token, until its answer is full."""
    return (text[start : start + _PIECE_CHARS] for start in range(0, len(text), _PIECE_CHARS))


def held_back(text: str, mark: str) -> int:
    """Length of the suffix of `text` that may begin `mark`, including white space before it, which a model may write
    until its answer is full: MAX_HEAD characters of that."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            break
    else:
        length = 0
    body = text[max(0, len(text) - length - MAX_HEAD) : len(text) - length]
    return length + len(body) - len(body.rstrip())


def read_up_to(mark: str, text: str, events: list[Event]) -> tuple[bool, str]:
    """Emit the content before `mark`. Returns whether the mark was found, and the text after it; if not found, the
    suffix that may begin one."""
    found, rest = read_up_to_any((mark,), text, events)
    return bool(found), rest


def read_up_to_any(marks: Sequence[str], text: str, events: list[Event]) -> tuple[str, str]:
    """As `read_up_to`, of the first mark in the text: the mark, "" for none, and the text after it."""
    place, mark = min(((place, mark) for mark in marks if (place := text.find(mark)) >= 0), default=(-1, ""))
    if mark:
        if text[:place].strip():
            events.append(Content(text[:place].rstrip()))
        return mark, text[place + len(mark) :]
    ready = len(text) - max((held_back(text, mark) for mark in marks), default=0)
    if text[:ready]:
        events.append(Content(text[:ready]))
    return "", text[ready:]


class SteppingParser(ABC):
    """Consumes the collected text in steps, until a step needs more of it."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for piece in pieces(text):
            if self._collect(piece):
                while self._step(events):
                    pass
        return events

    def _collect(self, piece: str) -> bool:
        """Add to the text. Returns whether it is to be looked at."""
        self._text += piece
        return True

    @abstractmethod
    def _step(self, events: list[Event]) -> bool:
        """Consume some of the text. Returns False if more text is needed."""


class HermesParser(SteppingParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, text around them."""

    begin, end = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._call: JsonCall | None = None
        self._is_behind_call = False

    def _step(self, events: list[Event]) -> bool:
        if self._call is None:
            return self._read_content(events)
        found, rest = self._call.feed(self._text)
        events += found
        self._text = rest
        if self._call.is_broken:
            events.append(Content(self.begin + self._call.raw))
        elif self._call.is_done:
            self._is_behind_call = True
        else:
            return False
        self._call = None
        return True

    def _read_content(self, events: list[Event]) -> bool:
        if self._is_behind_call:
            start = self._text.lstrip()
            if self.end.startswith(start):  # not all of it yet
                self._is_behind_call = start != self.end
                self._text = start if self._is_behind_call else ""
                return False
            self._is_behind_call, self._text = False, start.removeprefix(self.end)
        is_found, self._text = read_up_to(self.begin, self._text, events)
        if is_found:
            self._call = JsonCall()
        return is_found

    def finish(self) -> list[Event]:
        call, self._call = self._call, None
        if call is not None:
            return [] if call.has_started else [Content(self.begin + call.raw)]
        return [Content(self._text)] if self._text.strip() and not self._is_behind_call else []


class Llama3Parser:
    """The whole answer is `{"name": ..., "parameters": {...}}`, several divided by `;`, perhaps after <|python_tag|>.

    There is no mark, so an object counts as a call only if it names one of the tools.
    """

    mark = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""
        self._calls = 0
        self._call: JsonCall | None = None
        self._waiting: list[Event] = []
        self._is_content = False

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for piece in pieces(text):
            if self._is_content:
                events.append(Content(piece))
                continue
            self._text += piece
            while not self._is_content and self._step(events):
                pass
        return events

    def _step(self, events: list[Event]) -> bool:
        if self._call is None:
            start = self._text.lstrip(" \t\r\n;," if self._calls else " \t\r\n").removeprefix(self.mark).lstrip()
            if not start or self.mark.startswith(start):
                self._text = self._text[-MAX_HEAD:] if self._calls else self._text
                return len(self._text) > MAX_HEAD and self._give_up(events, self._text)
            if not start.startswith("{"):
                return self._give_up(events, self._text)
            self._call, self._text = JsonCall(), start
        found, self._text = self._call.feed(self._text)
        self._waiting += found
        if (self._waiting and self._call.name not in self._names) or self._call.is_broken:
            return self._give_up(events, self._call.raw + self._text)
        events += self._waiting
        self._waiting = []
        if self._call.is_done:
            self._call, self._calls = None, self._calls + 1
            return True
        return False

    def _give_up(self, events: list[Event], text: str) -> bool:
        if not self._calls or text.strip():
            events.append(Content(text))
        self._is_content, self._text, self._call = True, "", None
        return False

    def finish(self) -> list[Event]:
        text = self._text if self._call is None else "" if self._call.has_started else self._call.raw
        return [Content(text)] if text.strip(" \t\r\n;,") and not self._is_content else []
