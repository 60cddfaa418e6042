"""Parsers of calls between marks: a name and JSON (DeepSeek, Kimi), or a name and parameters one by one, as in XML
(Qwen3-Coder, GLM, MiniMax)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.server.tools.json_call import CallArguments, CallStart, Content, Event, JsonCall
from slipstream.server.tools.parsers import MAX_HEAD, SteppingParser, held_back, read_up_to_any

_LONG_VALUE_CHARS = 1 << 16  # of a parameter

Schemas = Mapping[str, Mapping[str, Any]]  # a tool's name -> the JSON schema of its parameters


@dataclass(frozen=True)
class JsonMarks:
    """begin, end: of a call. idle: marks around calls. read_head: the text before the arguments -> (name, id)."""

    begin: str
    end: str
    idle: tuple[str, ...]
    read_head: Callable[[str], tuple[str, str]]


def _deepseek_head(head: str) -> tuple[str, str]:
    kind, _, name = head.strip().removesuffix("```json").strip().partition("<｜tool▁sep｜>")
    return (name or kind).strip(), ""  # V3 and R1: function<sep>name; V3.1: name<sep>


def _kimi_head(head: str) -> tuple[str, str]:
    call_id = head.partition("<|tool_call_argument_begin|>")[0].strip()
    return call_id.removeprefix("functions.").rpartition(":")[0] or call_id, call_id


_DEEPSEEK_IDLE = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK = JsonMarks("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _DEEPSEEK_IDLE, _deepseek_head)
_KIMI_IDLE = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI = JsonMarks("<|tool_call_begin|>", "<|tool_call_end|>", _KIMI_IDLE, _kimi_head)


class MarkedJsonParser(SteppingParser):
    def __init__(self, marks: JsonMarks) -> None:
        super().__init__()
        self._marks = marks
        self._is_in_head = self._is_behind_arguments = False
        self._call: JsonCall | None = None

    def _step(self, events: list[Event]) -> bool:
        if self._call is not None:
            found, self._text = self._call.feed(self._text)
            events += found
            if not (self._call.is_done or self._call.is_broken):
                return False
            self._call, self._is_behind_arguments = None, True
            return True
        if self._is_in_head:
            return self._read_head(events)
        if self._is_behind_arguments:  # up to the end mark there is nothing to show
            return self._skip()
        mark, self._text = read_up_to_any((self._marks.begin, *self._marks.idle), self._text, events)
        self._is_in_head = mark == self._marks.begin
        return bool(mark)

    def _read_head(self, events: list[Event]) -> bool:
        head, brace, _ = self._text.partition("{")
        if self._marks.end in head or len(head) > MAX_HEAD:
            events.append(Content(self._marks.begin))
            self._is_in_head = False
        elif brace:
            name, call_id = self._marks.read_head(head)
            self._call, self._text = JsonCall(name or "unknown", call_id), self._text[len(head) :]
            self._is_in_head = False
        else:
            return False
        return True

    def _skip(self) -> bool:
        _, mark, rest = self._text.partition(self._marks.end)
        self._is_behind_arguments = not mark
        self._text = rest if mark else self._text[len(self._text) - held_back(self._text, self._marks.end) :]
        return bool(mark)

    def finish(self) -> list[Event]:
        if self._is_in_head:
            return [Content(self._marks.begin + self._text)]
        is_shown = self._call is None and not self._is_behind_arguments
        return [Content(self._text)] if is_shown and self._text.strip() else []


@dataclass(frozen=True)
class XmlMarks:
    """Marks of a call: its begin; then its name; parameters (name, value), each ended by `close`; its end.

    before_end: what may come before its end. idle: marks around calls."""

    begin: str
    name: re.Pattern[str]
    parameter: re.Pattern[str]
    close: str
    end: re.Pattern[str]
    before_end: str = ""
    idle: tuple[str, ...] = ()


QWEN_CODER = XmlMarks(
    "<tool_call>",
    re.compile(r"\s*<function=([^>\n]{1,256})>"),
    re.compile(r"\s*<parameter=([^>\n]{1,256})>\n?(.*?)\n?</parameter>", re.DOTALL),
    "</parameter>",
    re.compile(r"(?:</function>)?</tool_call>"),
    before_end="</function>",
)
GLM = XmlMarks(
    "<tool_call>",
    re.compile(r"\s*([^\s<{]{1,256})\s*(?=<)"),
    re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
    "</arg_value>",
    re.compile("</tool_call>"),
)
MINIMAX = XmlMarks(
    "<invoke",
    re.compile(r"\s*name=\"([^\"]{1,256})\"\s*>"),
    re.compile(r"\s*<parameter name=\"([^\"]{1,256})\">(.*?)</parameter>", re.DOTALL),
    "</parameter>",
    re.compile("</invoke>"),
    idle=("<minimax:tool_call>", "</minimax:tool_call>"),
)


class XmlParser(SteppingParser):
    """A parameter is emitted when it is whole, as JSON of the type that the tool's schema says."""

    def __init__(self, marks: XmlMarks, schemas: Schemas) -> None:
        super().__init__()
        self._marks, self._schemas = marks, schemas
        self._is_calling = False
        self._name = ""
        self._num_parameters = self._num_searched = 0
        self._waiting: list[str] = []  # behind a long value
        self._num_waiting = 0
        self._border = ""  # what came last, which may begin the end of the value

    def _collect(self, piece: str) -> bool:
        """What follows in a long value waits for its end, or until there is an eighth as much: each time that text is
        added all before it is copied."""
        if self._num_searched <= _LONG_VALUE_CHARS:
            return super()._collect(piece)
        end = (self._border if self._waiting else self._text[-len(self._marks.close) :]) + piece
        self._waiting.append(piece)
        self._num_waiting += len(piece)
        self._border = end[-len(self._marks.close) :]
        if self._marks.close not in end and self._num_waiting < self._num_searched // 8:
            return False
        self._take_waiting()
        return True

    def _take_waiting(self) -> None:
        self._text += "".join(self._waiting)
        self._waiting, self._num_waiting = [], 0

    def _step(self, events: list[Event]) -> bool:
        if not self._is_calling:
            mark, self._text = read_up_to_any((self._marks.begin, *self._marks.idle), self._text, events)
            self._is_calling = mark == self._marks.begin
            return bool(mark)
        return self._read_parameter(events) if self._name else self._read_name(events)

    def _read_name(self, events: list[Event]) -> bool:
        if found := self._marks.name.match(self._text):
            self._name, self._text = found[1], self._text[found.end() :]
            self._num_parameters = self._num_searched = 0
            events.append(CallStart(self._name))
            return True
        if len(self._text) < MAX_HEAD and ">" not in self._text and "{" not in self._text:
            return False
        events.append(Content(self._marks.begin))
        self._is_calling = False
        return True

    def _read_parameter(self, events: list[Event]) -> bool:
        self._drop_white_space()
        if found := self._marks.end.match(self._text):
            events.append(CallArguments("}" if self._num_parameters else "{}"))
            self._is_calling, self._name, self._text = False, "", self._text[found.end() :]
            self._num_searched = 0
            return True
        # a long value is searched once, not again with each of its tokens
        if self._text.find(self._marks.close, max(0, self._num_searched - len(self._marks.close))) < 0:
            self._num_searched = len(self._text)
            return False
        found = self._marks.parameter.match(self._text)
        if found is None:  # something between the parameters
            _, _, self._text = self._text.partition(self._marks.close)
        else:
            key, value = found[1].strip(), found[2]
            text = f"{json.dumps(key)}: {self._json_of(key, value)}"
            events.append(CallArguments(f"{', ' if self._num_parameters else '{'}{text}"))
            self._num_parameters += 1
            self._text = self._text[found.end() :]
        self._num_searched = 0
        return True

    def _drop_white_space(self) -> None:
        """What stands between parameters and before the end of a call, perhaps until the answer is full."""
        text, before_end = self._text.lstrip(), self._marks.before_end
        if before_end and text.startswith(before_end):
            text = before_end + text[len(before_end) :].lstrip()
        if len(text) < len(self._text):
            self._text, self._num_searched = text, 0

    def _json_of(self, key: str, value: str) -> str:
        properties = self._schemas.get(self._name, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        if not may_be_text(schema):
            try:
                json.loads(value, parse_constant=_refuse)
                return value.strip()
            except (ValueError, RecursionError):  # the model has not kept to the schema
                pass
        elif isinstance(schema, Mapping) and value.strip() in _listed(schema):  # white space is allowed around these
            value = value.strip()
        return json.dumps(value, ensure_ascii=False)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._waiting:
            self._take_waiting()
            while self._step(events):
                pass
        if not self._is_calling:
            return [*events, Content(self._text)] if self._text.strip() else events
        return events if self._name else [*events, Content(self._marks.begin + self._text)]


def may_be_text(schema: object) -> bool:
    """Whether a parameter's schema names strings; one without a type is read as JSON where that can be."""
    if not isinstance(schema, Mapping):
        return False
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    ways = schema.get("anyOf") or schema.get("oneOf") or []
    is_text = "string" in names or any(isinstance(value, str) for value in _listed(schema))
    return is_text or (isinstance(ways, list) and any(isinstance(way, Mapping) and _is_text(way) for way in ways))


def _listed(schema: Mapping[str, Any]) -> list[Any]:
    values = schema.get("enum", [schema.get("const")])
    return values if isinstance(values, list) else []


def _is_text(way: Mapping[str, Any]) -> bool:
    return way.get("type") == "string"


def _refuse(constant: str) -> object:
    raise ValueError(constant)
