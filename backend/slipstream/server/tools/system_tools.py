"""Tools for chat templates that read them, as JSON, from the system message (Phi-4-mini) and know no `tool_calls`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_READ = re.compile(r"\[['\"]tools['\"]\]|'tools' in ")  # message['tools']
_SYSTEM = {"role": "system", "content": "You are a helpful assistant with some tools."}  # of Phi-4-mini's model card


def reads_system_tools(source: str) -> bool:
    return _READ.search(source) is not None


def with_system_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, the first of which, made if there is none, tells of the tools; calls of earlier turns are text."""
    system, talk = (messages[0], messages[1:]) if messages[0]["role"] == "system" else (_SYSTEM, messages)
    told = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return [{**system, "tools": told}, *map(_with_calls_as_text, talk)]


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    if not functions:
        return message
    calls = [{"name": function["name"], "arguments": function["arguments"]} for function in functions]
    text = json.dumps(calls, ensure_ascii=False)
    return {**message, "content": f"{message.get('content') or ''}<|tool_call|>{text}<|/tool_call|>"}
