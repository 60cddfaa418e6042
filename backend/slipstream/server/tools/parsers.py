"""Parsers of tool calls in a model's text: Hermes / Qwen, Llama 3, Mistral, and calls forced by a grammar.

A parser belongs to one answer: feed() takes text deltas, finish() the rest. Text that only looks like a call becomes
content. Marks may be split over tokens, so a possible beginning of one is held back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Protocol

from slipstream.server.tools.json_call import CallArguments, CallStart, Content, Event, JsonCall


class ToolParser(Protocol):
    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


def held_back(text: str, mark: str) -> int:
    """Length of the suffix of `text` that may begin `mark`, including white space before it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            break
    else:
        length = 0
    body = text[: len(text) - length]
    return length + len(body) - len(body.rstrip())


def _read_up_to(mark: str, text: str, events: list[Event]) -> tuple[bool, str]:
    """Emit the content before `mark`. Returns whether the mark was found, and the text after it; if not found, the
    suffix that may begin one."""
    before, found, after = text.partition(mark)
    if found:
        if before.strip():
            events.append(Content(before.rstrip()))
        return True, after
    ready = len(before) - held_back(before, mark)
    if before[:ready]:
        events.append(Content(before[:ready]))
    return False, before[ready:]


class _SteppingParser(ABC):
    """Consumes the collected text in steps, until a step needs more of it."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        self._text += text
        while self._step(events):
            pass
        return events

    @abstractmethod
    def _step(self, events: list[Event]) -> bool:
        """Consume some of the text. Returns False if more text is needed."""


class HermesParser(_SteppingParser):
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
                self._text = self._text if self._is_behind_call else ""
                return False
            self._is_behind_call, self._text = False, start.removeprefix(self.end)
        is_found, self._text = _read_up_to(self.begin, self._text, events)
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
        if self._is_content:
            return [Content(text)] if text else []
        self._text += text
        events: list[Event] = []
        while not self._is_content and self._step(events):
            pass
        return events

    def _step(self, events: list[Event]) -> bool:
        if self._call is None:
            start = self._text.lstrip(" \t\r\n;," if self._calls else " \t\r\n").removeprefix(self.mark).lstrip()
            if not start or self.mark.startswith(start):
                return False
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


class CallList:
    """`[{"name": ..., "arguments": {...}}, ...]`: Mistral's list, and the form that `tool_choice: required` forces."""

    def __init__(self) -> None:
        self.is_done = False
        self._call: JsonCall | None = None

    def feed(self, text: str) -> tuple[list[Event], str]:
        """(events, text after the list)."""
        events: list[Event] = []
        while text and not self.is_done:
            if self._call is None:
                text = text.lstrip(" \t\r\n[,")
                if text.startswith("]"):
                    self.is_done, text = True, text[1:]
                elif text:
                    self._call = JsonCall()
                continue
            found, text = self._call.feed(text)
            events += found
            if self._call.is_broken:
                events.append(Content(self._call.raw))
            if self._call.is_done or self._call.is_broken:
                self._call = None
        return events, text


class MistralParser(_SteppingParser):
    """`[TOOL_CALLS][{...}, ...]` (v3), or `[TOOL_CALLS]name[ARGS]{...}` and `[TOOL_CALLS]name{...}` (v11 and later).

    An id may stand behind the name: `name[CALL_ID]123456789[ARGS]{...}`.
    """

    mark, id_mark, arguments_mark = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

    def __init__(self) -> None:
        super().__init__()
        self._is_calling = False
        self._reader: CallList | JsonCall | None = None

    def _step(self, events: list[Event]) -> bool:
        if self._reader is not None:
            found, self._text = self._reader.feed(self._text)
            events += found
            if not self._reader.is_done:
                return False
            self._reader, self._is_calling = None, False
            return bool(self._text)
        return self._begin() if self._is_calling else self._read_content(events)

    def _begin(self) -> bool:
        """Read the text after the mark: a list, or a name and its arguments."""
        text = self._text.lstrip()
        if text.startswith("["):
            self._reader = CallList()
            return True
        head, brace, _ = text.partition("{")
        if not brace:
            return False
        self._text = text[len(head) :]
        name, _, call_id = head.strip().removesuffix(self.arguments_mark).partition(self.id_mark)
        self._reader = JsonCall(name.strip() or "unknown", call_id.strip())
        return True

    def _read_content(self, events: list[Event]) -> bool:
        self._is_calling, self._text = _read_up_to(self.mark, self._text, events)
        return self._is_calling

    def finish(self) -> list[Event]:
        return [Content(self._text)] if self._text.strip() and self._reader is None else []


class NamedParser:
    """`tool_choice` names one function: a grammar makes the whole text its arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_started = False

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        start: list[Event] = [] if self._has_started else [CallStart(self._name)]
        self._has_started = True
        return [*start, CallArguments(text)]

    def finish(self) -> list[Event]:
        return []


class RequiredParser:
    """`tool_choice: required`: a grammar makes the whole text a list of calls."""

    def __init__(self) -> None:
        self._list = CallList()

    def feed(self, text: str) -> list[Event]:
        return self._list.feed(text)[0]

    def finish(self) -> list[Event]:
        return []
