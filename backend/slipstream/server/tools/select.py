"""Selects a model's tool format, and plans a request's `tools` and `tool_choice`. Pure functions."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from slipstream.server.errors import ApiError
from slipstream.server.schemas import ChatRequest, FunctionName, NamedTool, Tool
from slipstream.server.tools import marked
from slipstream.server.tools.calls_grammar import PLAIN_LIST, ListForm, calls_guide
from slipstream.server.tools.harmony import HarmonyParser
from slipstream.server.tools.lists import ListParser, MistralParser, PythonicParser
from slipstream.server.tools.parsers import HermesParser, Llama3Parser, ToolParser

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFormat:
    """grammar: of calls, a format of xgrammar's model templates or a list. shows_marks: the format's marks are special
    tokens, which are output only on request."""

    name: str
    make_parser: Callable[[marked.Schemas], ToolParser]
    grammar: str | ListForm = PLAIN_LIST
    shows_marks: bool = False
    is_id_short: bool = False  # Mistral's template takes ids of nine letters and digits only

    def make_id(self) -> str:
        if self.is_id_short:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def _json_marks(marks: marked.JsonMarks) -> Callable[[marked.Schemas], ToolParser]:
    return lambda schemas: marked.MarkedJsonParser(marks)


def _xml_marks(marks: marked.XmlMarks) -> Callable[[marked.Schemas], ToolParser]:
    return lambda schemas: marked.XmlParser(marks, schemas)


_PHI_MARKS, _PHI_END = ("<|tool_call|>", "functools"), ("<|/tool_call|>",)
FORMATS = {
    form.name: form
    for form in (
        ToolFormat("hermes", lambda schemas: HermesParser(), "qwen_3"),
        ToolFormat("llama3", Llama3Parser, "llama"),
        ToolFormat(
            "mistral", lambda schemas: MistralParser(), ListForm("[TOOL_CALLS]"), shows_marks=True, is_id_short=True
        ),
        ToolFormat("qwen3_coder", _xml_marks(marked.QWEN_CODER), "qwen_3_coder"),
        ToolFormat("deepseek_v3", _json_marks(marked.DEEPSEEK), "deepseek_r1", shows_marks=True),
        ToolFormat("deepseek_v31", _json_marks(marked.DEEPSEEK), "deepseek_v3_1", shows_marks=True),
        ToolFormat("glm45", _xml_marks(marked.GLM), "glm_4_7", shows_marks=True),
        ToolFormat("kimi_k2", _json_marks(marked.KIMI), "kimi", shows_marks=True),
        ToolFormat("minimax_m2", _xml_marks(marked.MINIMAX), "minimax", shows_marks=True),
        ToolFormat("harmony", lambda schemas: HarmonyParser(), "harmony", shows_marks=True),
        ToolFormat("pythonic", lambda schemas: PythonicParser(), shows_marks=True),
        ToolFormat(
            "granite", lambda schemas: ListParser(("<|tool_call|>",)), ListForm("<|tool_call|>"), shows_marks=True
        ),
        ToolFormat(
            "phi4", lambda schemas: ListParser(_PHI_MARKS, _PHI_END), ListForm("<|tool_call|>"), shows_marks=True
        ),
    )
}
# other names of vLLM's parsers
ALIASES = {
    "llama3_json": "llama3",
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "openai": "harmony",
    "llama4_pythonic": "pythonic",
    "phi4_mini_json": "phi4",
}
ANY_FORMAT = ToolFormat("json", lambda schemas: ListParser())  # of forced calls, where the template has none
_SIGNS = (
    ("<|channel|>", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|tool_call_begin|>", "kimi_k2"),
    ("```json", "deepseek_v3"),
    ("<｜tool▁call▁begin｜>", "deepseek_v31"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3"),
    ("ipython", "llama3"),
    ("<|tool_call|>", "granite"),
    ("<|tool|>", "phi4"),
)


def select_format(asked: str, template: str) -> ToolFormat | None:
    """The format named on the command line; for "auto" the one that the chat template writes, if any."""
    if asked != "auto":
        return FORMATS.get(ALIASES.get(asked, asked))
    names = (name for sign, name in _SIGNS if sign in template)
    return next((FORMATS[name] for name in names if name != "deepseek_v3" or "<｜tool▁sep｜>" in template), None)


@dataclass(frozen=True)
class ToolUse:
    """guide: the grammar of the text, if the choice forces calls. make_parser: None if the text is only content."""

    tools: list[dict[str, Any]] | None = None
    guide: dict[str, Any] | None = None
    make_parser: Callable[[], ToolParser] | None = None
    make_id: Callable[[], str] = str
    shows_marks: bool = False
    has_reasoning: bool = False  # which the parser tells from the text
    is_legacy: bool = False  # asked for as `functions`: the answer has one `function_call`

    @property
    def finish_reason(self) -> str:
        """The finish reason of an answer that calls."""
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
    used = form or ANY_FORMAT
    if isinstance(choice, NamedTool):
        tools = [_named(tools, choice.function.name)]
    elif choice != "required" and form is None:
        message = (
            "tools: this model's chat template has no format for tool calls; accepted: tool_choice none, required or a "
            "named function, or a gateway started with --tool-parser"
        )
        raise ApiError(400, message, param="tools")
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    is_forced = isinstance(choice, NamedTool) or choice == "required"
    is_one = isinstance(choice, NamedTool) or is_parallel is False
    has_grammar = is_forced or (used.grammar != PLAIN_LIST and any(tool.function.strict for tool in tools))
    guide = calls_guide(used.grammar, tools, is_forced, is_one) if has_grammar else None
    return ToolUse(shown, guide, lambda: used.make_parser(schemas), used.make_id, used.shows_marks)


def _named(tools: list[Tool], name: str) -> Tool:
    for tool in tools:
        if tool.function.name == name:
            return tool
    known = ", ".join(tool.function.name for tool in tools)
    raise ApiError(400, f"tool_choice: no tool is named {name!r}, accepted: {known}", param="tool_choice")
