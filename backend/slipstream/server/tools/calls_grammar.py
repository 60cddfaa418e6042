"""The grammar of a model's tool calls, as a structural tag. Pure data: only the engine's grammar processes compile it.

A format of xgrammar's templates is a part `{"type": "tool_calls", "model": ...}`, which they fill in
(engine/structural_tags.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from slipstream.core.regex_syntax import UnenforcedError
from slipstream.core.schema_keywords import check_schema
from slipstream.server.schemas import Tool


@dataclass(frozen=True)
class ListForm:
    """mark + `[{"name": ..., "arguments": {...}}, ...]`"""

    mark: str = ""


PLAIN_LIST = ListForm()


def calls_guide(form: str | ListForm, tools: list[Tool], is_forced: bool, is_one: bool) -> dict[str, Any]:
    """is_forced: the answer is at least one call; otherwise text, in which calls keep to the schemas of their tools.
    is_one: no more than one."""
    if isinstance(form, ListForm):
        part = _list_of_calls(form, tools, is_forced, is_one)
    else:
        shown = [tool.model_dump(exclude_none=True) for tool in tools]
        choice = "required" if is_forced else "auto"
        part = {"type": "tool_calls", "model": form, "tools": shown, "tool_choice": choice}
        part["parallel_tool_calls"] = not is_one
    return {"structural_tag": {"type": "structural_tag", "format": part}}


def _list_of_calls(form: ListForm, tools: list[Tool], is_forced: bool, is_one: bool) -> dict[str, Any]:
    calls = [_call(tool, is_forced) for tool in tools]
    part = {"type": "tags_with_separator", "tags": calls, "separator": ", ", "at_least_one": True}
    whole = {"type": "tag", "begin": f"{form.mark}[", "content": {**part, "stop_after_first": is_one}, "end": "]"}
    if is_forced:
        return whole
    return {"type": "triggered_tags", "triggers": [form.mark], "tags": [whole], "stop_after_first": True}


def _call(tool: Tool, is_forced: bool) -> dict[str, Any]:
    """One call; `name` is first, so that it can be streamed first."""
    schema: object = tool.function.parameters
    if schema is None or tool.function.strict is False:
        schema = {"type": "object"}
    elif not is_forced and not tool.function.strict and not _is_enforced(schema):
        schema = {"type": "object"}  # a tool that need not be called fails no request
    content = {"type": "json_schema", "json_schema": schema}
    begin = f'{{"name": {json.dumps(tool.function.name)}, "arguments": '
    return {"type": "tag", "begin": begin, "content": content, "end": "}"}


def _is_enforced(schema: object) -> bool:
    try:
        check_schema(schema)
    except UnenforcedError:
        return False
    return True
