"""The part of an answer that a reasoning model writes for itself: told apart, bounded, kept out of grammars.

A format says how the model marks it. `think`: text between <think> and </think>, whose beginning may stand in the
prompt (Qwen3, DeepSeek-R1, GLM-4.5). `harmony`: the channels of gpt-oss (tools/harmony.py), which carry the calls of
tools too. Pure functions, and parsers like those of tools/parsers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from slipstream.server.errors import ApiError
from slipstream.server.schemas import ChatRequest
from slipstream.server.tools.harmony import HarmonyParser
from slipstream.server.tools.json_call import Content, Event, Reasoning
from slipstream.server.tools.parsers import ToolParser, held_back
from slipstream.server.tools.select import ToolUse

BEGIN, END = "<think>", "</think>"
_ANALYSIS, _FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
_END_OF_ANALYSIS, _NEXT = "<|end|>", "<|start|>assistant"
_AFTER_END = {"type": "regex", "pattern": r"\n{0,2}"}
_ANY_JSON = {"type": "object", "additionalProperties": True}

# the names of vLLM's parsers -> the format of these models
FORMATS = {
    **dict.fromkeys(("think", "qwen3", "deepseek_r1", "deepseek_v3", "glm45", "minimax_m2"), "think"),
    **dict.fromkeys(("harmony", "openai_gptoss"), "harmony"),
}
_SIGNS = (("<|channel|>", "harmony"), (END, "think"))


def select_reasoning(asked: str, template: str) -> str:
    """The format named on the command line; for "auto" the one of the chat template's marks; "" for none."""
    if asked != "auto":
        return FORMATS.get(asked, "")
    return next((name for sign, name in _SIGNS if sign in template), "")


@dataclass(frozen=True)
class ReasoningUse:
    """What one answer has of reasoning. is_open: the prompt ends within it; is_closed: behind it, so there is none."""

    format: str = ""
    is_open: bool = False
    is_closed: bool = False
    is_shown: bool = True


def plan_reasoning(request: ChatRequest, form: str, prompt: str) -> ReasoningUse:
    """Raises ApiError for a budget where there is no reasoning that could be ended."""
    end = prompt.rstrip()
    is_open = form == "think" and end.endswith(BEGIN)
    use = ReasoningUse(form, is_open, end.endswith(END), request.include_reasoning is not False)
    if request.thinking_token_budget is not None and not form:
        message = "thinking_token_budget: this model has no reasoning that the gateway knows; accepted: null"
        raise ApiError(400, message, param="thinking_token_budget")
    return use


def with_reasoning(tools: ToolUse, use: ReasoningUse) -> ToolUse:
    """The parser of the answer: of the reasoning, then of what comes behind it."""
    make_parser: Callable[[], ToolParser] | None = tools.make_parser
    if use.format == "harmony":
        make_parser = HarmonyParser  # it reads the calls too
    elif use.format and not use.is_closed:
        make_parser = lambda: ThinkParser(use.is_open, tools.make_parser)  # noqa: E731
    if make_parser is None or not use.format:
        return tools
    if not use.is_shown:
        shown = make_parser
        make_parser = lambda: _Silent(shown())  # noqa: E731
    shows_marks = tools.shows_marks or use.format == "harmony"
    return replace(tools, make_parser=make_parser, shows_marks=shows_marks, has_reasoning=True)


def guide_behind(
    use: ReasoningUse, guide: dict[str, Any] | None, budget: int | None, is_of_calls: bool = False
) -> dict[str, Any] | None:
    """A grammar that begins behind the reasoning, which ends after `budget` tokens; None if there is none to set.

    is_of_calls: the grammar is that of tool calls in the model's own form.
    """
    if not use.format or use.is_closed or (guide is None and budget is None):
        return guide
    thoughts: dict[str, Any] = {"type": "any_text", "excludes": [END if use.format == "think" else _END_OF_ANALYSIS]}
    if budget is not None:
        thoughts["max_tokens"] = budget
    if use.format == "harmony":
        if guide is not None and "structural_tag" in guide and not is_of_calls:
            return guide  # of one who knows the channels
        rest = [] if guide is None or is_of_calls else [_constant(_FINAL)]
        parts = [_constant(_ANALYSIS), thoughts, _constant(_END_OF_ANALYSIS + _NEXT), *rest, _format_of(guide)]
        at_once = [*rest, _format_of(guide, _ANALYSIS)]
    else:
        parts = [thoughts, _constant(END), _AFTER_END, _format_of(guide)]
        at_once = [_format_of(guide, BEGIN)]
    if use.is_open:
        whole = _sequence(parts)
    else:  # the model may answer at once
        begun = parts if use.format == "harmony" else [_constant(BEGIN), *parts]
        whole = {"type": "or", "elements": [_sequence(begun), _sequence(at_once)]}
    return {"structural_tag": {"type": "structural_tag", "format": whole}}


def _sequence(elements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements} if len(elements) > 1 else elements[0]


def _constant(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _format_of(guide: dict[str, Any] | None, excluded: str = "") -> dict[str, Any]:
    """A grammar as a part of a structural tag. excluded: what text without a grammar may not have."""
    for name, value in (guide or {}).items():
        if name == "json":
            return {"type": "json_schema", "json_schema": value}
        if name == "json_object" and value:
            return {"type": "json_schema", "json_schema": _ANY_JSON}
        if name == "regex":
            return {"type": "regex", "pattern": value}
        if name == "grammar":
            return {"type": "grammar", "grammar": value}
        if name == "choice":
            return {"type": "or", "elements": [_constant(choice) for choice in value]}
        if name == "structural_tag" and isinstance(value, dict) and isinstance(value.get("format"), dict):
            return dict(value["format"])
    return {"type": "any_text", "excludes": [excluded] if excluded else []}


class ThinkParser:
    """Reasoning up to </think>, then what `behind` reads, or content.

    is_open: the reasoning begins with the text; a mark that the model writes once more is none of it.
    """

    def __init__(self, is_open: bool, make_behind: Callable[[], ToolParser] | None) -> None:
        self._is_open, self._has_begun = is_open, False
        self._behind = make_behind() if make_behind is not None else None
        self._is_over = self._has_content = False
        self._text = ""

    def feed(self, text: str) -> list[Event]:
        if self._is_over:
            return self._content(text)
        self._text += text
        if not self._has_begun:
            start = self._text.lstrip()
            if BEGIN.startswith(start):  # not all of it yet
                self._text = start
                return []
            self._has_begun = True
            if not start.startswith(BEGIN) and not self._is_open:
                return self._end(self._text)
            self._text = start.removeprefix(BEGIN)
        before, found, after = self._text.partition(END)
        ready = len(before.rstrip()) if found else len(before) - held_back(before, END)
        events = self._thoughts(before[:ready])
        self._text = before[ready:]
        return [*events, *self._end(after)] if found else events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if not self._is_over:
            rest, self._text = self._text, ""
            events = self._thoughts(rest.rstrip()) if self._has_begun or self._is_open else self._end(rest)
        return [*events, *(self._behind.finish() if self._behind is not None else [])]

    def _thoughts(self, text: str) -> list[Event]:
        text = text if self._has_content else text.lstrip()
        self._has_content = self._has_content or bool(text)
        return [Reasoning(text)] if text else []

    def _end(self, after: str) -> list[Event]:
        self._is_over, self._text, self._has_content = True, "", False
        return self._content(after)

    def _content(self, text: str) -> list[Event]:
        text = text if self._has_content else text.lstrip()
        self._has_content = self._has_content or bool(text)
        if self._behind is not None:
            return self._behind.feed(text)
        return [Content(text)] if text else []


class _Silent:
    """A parser's events without the reasoning."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[Event]:
        return [event for event in self._parser.feed(text) if not isinstance(event, Reasoning)]

    def finish(self) -> list[Event]:
        return [event for event in self._parser.finish() if not isinstance(event, Reasoning)]
