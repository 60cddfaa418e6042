"""One tool call written as JSON, read as it is generated: {"name": "f", "arguments": {...}} -> events.

A scanner, not a parser: it follows strings and brackets, so that arguments stream character by character before the
object is complete. Holds the state of one call; the formats around it are in parsers.py.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"
_IN_STRING = re.compile(r"(?:[^\"\\]+|\\.)+", re.DOTALL)
_NESTED = re.compile(r"(?:[^\"{}\[\]]+|\"(?:[^\"\\]|\\.)*\")+", re.DOTALL)  # below the call's own level


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model writes for itself before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """call_id: as the model wrote it, "" if it wrote none."""

    name: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON text of the latest call's arguments."""

    text: str


Event = Content | Reasoning | CallStart | CallArguments


class JsonCall:
    """feed() until is_done; `raw` is the text up to where the call has started. name: if it is known beforehand
    (perhaps with an id), the text contains the arguments only.

    is_broken: the text is no JSON object or no call; nothing was emitted and `raw` is the text.
    """

    def __init__(self, name: str = "", call_id: str = "") -> None:
        self._read: list[str] = []  # texts are kept in pieces: a call may have a megabyte, which `+=` copies each time
        self.is_done = False
        self.is_broken = False
        self.has_started = False
        self.name = name
        self._call_id = call_id
        self._is_bare = bool(name)
        self._key = ARGUMENT_KEYS[0] if name else ""
        self._depth = 1 if name else 0
        self._string: list[str] | None = None  # the string being read, with its escapes
        self._is_escaped = False
        self._is_value = bool(name)
        self._arguments: list[str] = []  # not emitted yet
        self._has_arguments = False

    @property
    def raw(self) -> str:
        return "".join(self._read)

    def feed(self, text: str) -> tuple[list[Event], str]:
        """(events, text after the call)."""
        at = 0
        while at < len(text) and not (self.is_done or self.is_broken):
            end = self._end_of_plain(text, at)
            if end > at:
                self._take_plain(text[at:end])
            else:
                end += 1
                self._take(text[at])
            at = end
        if not self.has_started:
            self._read.append(text[:at])
        return self._events(), text[at:]

    def _end_of_plain(self, text: str, at: int) -> int:
        """Where what is read as a whole ends: arguments may have 100 kB, and a character takes 4 us."""
        if self._is_escaped or (self._string is None and self._depth <= 1):
            return at
        found = (_NESTED if self._string is None else _IN_STRING).match(text, at)
        return found.end() if found is not None else at

    def _take_plain(self, piece: str) -> None:
        self._argue(piece)
        if self._string is not None and self._depth == 1:
            self._string.append(piece)

    def _events(self) -> list[Event]:
        if self.is_broken or not self.name or not (self._has_arguments or self.is_done):
            return []
        # some models write them as a string of JSON
        if not self.has_started and self._arguments and self._arguments[0].startswith('"'):
            if not self.is_done:
                return []
            self._arguments = [_unquoted("".join(self._arguments))]
        events: list[Event] = []
        if not self.has_started:
            self.has_started = True
            events.append(CallStart(self.name, self._call_id))
        if self.is_done and not self._has_arguments:
            self._arguments = ["{}"]
        if self._arguments:
            events.append(CallArguments("".join(self._arguments)))
            self._arguments = []
        return events

    def _take(self, char: str) -> None:
        if self._depth == 0:
            if char == "{":
                self._depth = 1
            elif char not in _SPACE:
                self.is_broken = True
            return
        if self._string is not None:
            return self._in_string(char)
        if char == '"':
            self._string = [char]
            self._argue(char)
        elif char in "{[":
            self._depth += 1
            self._argue(char)
        elif char in "}]":
            self._close(char)
        elif self._depth == 1 and char == ":" and not self._is_value:
            self._is_value = True
        elif self._depth == 1 and char == ",":
            self._key, self._is_value = "", False
        elif self._has_arguments or char not in _SPACE:
            self._argue(char)

    def _in_string(self, char: str) -> None:
        assert self._string is not None
        self._argue(char)
        if self._depth == 1:
            self._string.append(char)
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            whole, self._string = self._string, None
            if self._depth == 1:
                self._end_string("".join(whole))

    def _end_string(self, whole: str) -> None:
        """End a string at the top level of the call: a key, or the name."""
        try:
            text = _text_of(whole)
        except ValueError:
            self.is_broken = not self.has_started
            return
        if not self._is_value:
            self._key = text
        elif self._key == "name" and not self.name:
            self.name = text

    def _close(self, char: str) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.is_done = True
            self.is_broken = not self.name
            return
        self._argue(char)
        if self._is_bare and self._depth == 1:
            self.is_done = True

    def _argue(self, text: str) -> None:
        """Append text of the arguments' value."""
        if self._is_value and self._key in ARGUMENT_KEYS and (self._depth > 1 or text not in _SPACE or self._string):
            self._has_arguments = True
            self._arguments.append(text)


def _unquoted(text: str) -> str:
    try:
        return _text_of(text)
    except ValueError:
        return text


def _text_of(literal: str) -> str:
    """The text of a JSON string. Half a surrogate, which no answer can hold, becomes "?"."""
    return str(json.loads(literal, strict=False)).encode("utf-8", "replace").decode()
