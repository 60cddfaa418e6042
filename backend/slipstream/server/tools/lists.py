"""Parsers of calls that a model writes as a list: of JSON objects (Mistral, Granite, Phi), or of Python (Llama 4)."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Sequence

from slipstream.server.tools.json_call import CallArguments, CallStart, Content, Event, JsonCall
from slipstream.server.tools.parsers import MAX_HEAD, SteppingParser, read_up_to, read_up_to_any

MAX_PYTHON_CHARS = 1 << 16  # of a list of calls: they are read at once


class CallList:
    """`[{"name": ..., "arguments": {...}}, ...]`. mark: the text before it, content if the first entry is no call.

    is_broken: an entry is no call. It is content, with all that was read since the last call; so is what follows.
    """

    def __init__(self, mark: str = "") -> None:
        self.is_done = self.is_broken = False
        self._call: JsonCall | None = None
        self._before = [mark]  # read since the last call

    def feed(self, text: str) -> tuple[list[Event], str]:
        """(events, text after the list, or after the entry that broke it)."""
        events: list[Event] = []
        while text and not self.is_done:
            if self._call is None:
                rest = text.lstrip(" \t\r\n[,")
                self._before.append(text[: len(text) - len(rest)])
                text = rest
                if text.startswith("]"):
                    self.is_done, text = True, text[1:]
                elif text:
                    self._call = JsonCall()
                continue
            found, text = self._call.feed(text)
            events += found
            if self._call.is_broken:
                events.append(Content("".join(self._before) + self._call.raw))
                self.is_done = self.is_broken = True
            elif self._call.is_done:
                self._call, self._before = None, []
        return events, text


class ListParser(SteppingParser):
    """A mark and the list: `<|tool_call|>[...]` (Granite 3, Phi 4), `functools[...]` (Phi 4). idle: marks to leave out.

    Without marks the whole text is the list, as a grammar forces it for models whose template has no format of calls.
    """

    def __init__(self, marks: Sequence[str] = (), idle: Sequence[str] = ()) -> None:
        super().__init__()
        self._marks, self._idle = tuple(marks), tuple(idle)
        self._list: CallList | None = None if marks else CallList()

    def _step(self, events: list[Event]) -> bool:
        if self._list is not None:
            found, self._text = self._list.feed(self._text)
            events += found
            if not self._list.is_done or not (self._marks or self._list.is_broken):
                return False
            self._list = None
            return bool(self._text)
        mark, rest = read_up_to_any((*self._marks, *self._idle), self._text, events)
        if mark in self._marks:
            start = rest.lstrip()
            if (start and not start.startswith("[")) or len(rest) - len(start) > MAX_HEAD:
                events.append(Content(mark))
            elif not start:  # what follows decides
                self._text = mark + rest
                return False
            else:
                self._list = CallList(mark)
        self._text = rest
        return bool(mark)

    def finish(self) -> list[Event]:
        return [Content(self._text)] if self._text.strip() and self._list is None else []


class MistralParser(SteppingParser):
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
        return self._begin(events) if self._is_calling else self._read_content(events)

    def _begin(self, events: list[Event]) -> bool:
        """Read the text after the mark: a list, or a name and its arguments."""
        text = self._text.lstrip()
        if text.startswith("["):
            self._reader = CallList(self.mark)
            return True
        head, brace, _ = text.partition("{")
        if len(self._text) - len(text) + len(head) > MAX_HEAD:
            events.append(Content(self.mark))
            self._is_calling = False
            return True
        if not brace:
            return False
        self._text = text[len(head) :]
        name, _, call_id = head.strip().removesuffix(self.arguments_mark).partition(self.id_mark)
        self._reader = JsonCall(name.strip() or "unknown", call_id.strip())
        return True

    def _read_content(self, events: list[Event]) -> bool:
        self._is_calling, self._text = read_up_to(self.mark, self._text, events)
        return self._is_calling

    def finish(self) -> list[Event]:
        return [Content(self._text)] if self._text.strip() and self._reader is None else []


class PythonicParser:
    """The whole answer is `[f(a=1), g(b="x")]`, perhaps between <|python_start|> and <|python_end|> (Llama 3.2 and 4).

    A list is read when it is whole; one of JSON objects, which a grammar forces, as it comes.
    """

    begin, end = "<|python_start|>", "<|python_end|>"

    def __init__(self) -> None:
        self._text = ""
        self._feed: Callable[[str], list[Event]] = self._collect
        self._depth, self._place, self._quote = 0, 0, ""

    def feed(self, text: str) -> list[Event]:
        return self._feed(text) if text else []

    def _collect(self, text: str) -> list[Event]:
        self._text += text
        start = self._text.lstrip().removeprefix(self.begin).lstrip()
        if not start or self.begin.startswith(start):
            return self._give_up() if len(self._text) > MAX_HEAD else []
        if not start.startswith("["):
            return self._give_up()
        inner = start[1:].lstrip()
        if inner.startswith("{"):
            calls, self._text = CallList(self._text[: -len(start)]), ""
            self._feed = lambda text: self._read_entries(calls, text)
            return self._read_entries(calls, start)
        if inner and not (inner[0].isidentifier()):
            return self._give_up()
        if len(start) > MAX_PYTHON_CHARS:
            return self._give_up()
        size = self._size_of_list(start)
        if not size:
            return []
        events = python_calls(start[:size])
        if events is None:
            return self._give_up()
        self._feed, self._text = self._behind, ""
        return [*events, *self._behind(start[size:])]

    def _read_entries(self, calls: CallList, text: str) -> list[Event]:
        events, self._text = calls.feed(text)
        if calls.is_broken:
            return [*events, *self._give_up()]
        if calls.is_done:
            self._feed, self._text = self._behind, ""
        return events

    def _size_of_list(self, text: str) -> int:
        """The length of the list, 0 if it is not whole. Goes on where it stopped."""
        while self._place < len(text):
            char = text[self._place]
            self._place += 1
            if self._quote:
                if char == "\\":
                    self._place += 1
                elif char == self._quote:
                    self._quote = ""
            elif char in "\"'":
                self._quote = char
            elif char in "[{(":
                self._depth += 1
            elif char in "]})":
                self._depth -= 1
                if self._depth == 0:
                    return self._place
        return 0

    def _give_up(self) -> list[Event]:
        self._feed = lambda text: [Content(text)]
        text, self._text = self._text, ""
        return [Content(text)] if text else []

    def _behind(self, text: str) -> list[Event]:
        """Text behind the calls: the end mark and what a model adds to it are nothing to show."""
        return []

    def finish(self) -> list[Event]:
        text, self._text = self._text, ""
        return [Content(text)] if text.strip() else []


def python_calls(text: str) -> list[Event] | None:
    """The calls of `[f(a=1), ...]`, whose arguments are literals by name; None if the text is something else."""
    try:
        body = ast.parse(text.strip(), mode="eval").body
        if not isinstance(body, ast.List):
            return None
        events: list[Event] = []
        for call in body.elts:
            if not isinstance(call, ast.Call) or call.args or not (name := _dotted(call.func)):
                return None
            arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg is not None}
            if len(arguments) != len(call.keywords):
                return None
            events += [CallStart(name), CallArguments(json.dumps(arguments, allow_nan=False))]
        return events
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):  # of text that is no such list
        return None


def _dotted(function: ast.expr) -> str:
    """`f` or `module.f`; "" for any other expression."""
    names: list[str] = []
    while isinstance(function, ast.Attribute):
        names.append(function.attr)
        function = function.value
    return ".".join((function.id, *reversed(names))) if isinstance(function, ast.Name) else ""
