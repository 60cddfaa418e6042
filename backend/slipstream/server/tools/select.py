"""Selects a model's tool format, and plans a request's `tools` and `tool_choice`. Pure functions."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from slipstream.server.errors import ApiError
from slipstream.server.schemas import ChatRequest, FunctionName, NamedTool, Tool
from slipstream.server.tools.parsers import (
    HermesParser,
    Llama3Parser,
    MistralParser,
    NamedParser,
    RequiredParser,
    ToolParser,
)

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFormat:
    """shows_marks: the format's marks are special tokens, which are output only on request."""

    name: str
    make_parser: Callable[[Collection[str]], ToolParser]
    shows_marks: bool = False
    is_id_short: bool = False  # Mistral's template takes ids of nine letters and digits only

    def make_id(self) -> str:
        if self.is_id_short:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


FORMATS = {
    "hermes": ToolFormat("hermes", lambda names: HermesParser()),
    "llama3": ToolFormat("llama3", Llama3Parser),
    "mistral": ToolFormat("mistral", lambda names: MistralParser(), shows_marks=True, is_id_short=True),
}
_SIGNS = (("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3"), ("ipython", "llama3"))


def select_format(asked: str, template: str) -> ToolFormat | None:
    """The format named on the command line; for "auto" the one that the chat template writes, if any."""
    if asked != "auto":
        return FORMATS.get(asked)
    return next((FORMATS[name] for sign, name in _SIGNS if sign in template), None)


@dataclass(frozen=True)
class ToolUse:
    """guide: the grammar of the text, if the choice forces calls. make_parser: None if the text is only content."""

    tools: list[dict[str, Any]] | None = None
    guide: dict[str, Any] | None = None
    make_parser: Callable[[], ToolParser] | None = None
    make_id: Callable[[], str] = str
    shows_marks: bool = False
    is_legacy: bool = False  # asked for as `functions`: the answer has one `function_call`

    @property
    def finish_reason(self) -> str:
        """Of an answer that calls."""
        return "function_call" if self.is_legacy else "tool_calls"


def plan_tools(request: ChatRequest, form: ToolFormat | None) -> ToolUse:
    """Raises ApiError for a choice of an unknown tool, or for tools if the model has no tool format."""
    if not request.functions:
        return _plan(request.tools or [], request.tool_choice, request.parallel_tool_calls, form)
    if request.tools:
        raise ApiError(400, "functions: given together with tools, accepted: one of them", param="functions")
    tools, choice = [Tool(type="function", function=function) for function in request.functions], request.function_call
    asked = NamedTool(type="function", function=choice) if isinstance(choice, FunctionName) else choice
    return replace(_plan(tools, asked, False, form), is_legacy=True)


def _plan(
    tools: list[Tool], choice: str | NamedTool | None, is_parallel: bool | None, form: ToolFormat | None
) -> ToolUse:
    if not tools:
        if choice in (None, "none"):
            return ToolUse()
        raise ApiError(400, "tool_choice: given without tools", param="tool_choice")
    shown = [tool.model_dump(exclude_none=True) for tool in tools]
    if choice == "none":
        return ToolUse(shown)
    make_id = form.make_id if form is not None else FORMATS["hermes"].make_id
    if isinstance(choice, NamedTool):
        name = choice.function.name
        schema = _parameters(_named(tools, name))
        return ToolUse(shown, {"json": schema}, lambda: NamedParser(name), make_id)
    if choice == "required":
        return ToolUse(shown, {"json": _list_schema(tools, is_parallel)}, RequiredParser, make_id)
    if form is None:
        message = (
            "tools: this model's chat template has no format for tool calls; accepted: tool_choice none, required or a "
            "named function, or a gateway started with --tool-parser"
        )
        raise ApiError(400, message, param="tools")
    names = frozenset(tool.function.name for tool in tools)
    return ToolUse(shown, None, lambda: form.make_parser(names), make_id, form.shows_marks)


def _named(tools: list[Tool], name: str) -> Tool:
    for tool in tools:
        if tool.function.name == name:
            return tool
    known = ", ".join(tool.function.name for tool in tools)
    raise ApiError(400, f"tool_choice: no tool is named {name!r}, accepted: {known}", param="tool_choice")


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def _list_schema(tools: list[Tool], is_parallel: bool | None) -> dict[str, Any]:
    """The schema of a list of at least one call; `name` is first, so that it can be streamed first."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": _parameters(tool)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if is_parallel is False:
        schema["maxItems"] = 1
    return schema
