"""A request of the Messages API -> the chat that it means. Pure functions."""

from __future__ import annotations

import json
from typing import Any

from slipstream.core.chat_messages import text_of_part
from slipstream.server.chat_turn import chat_request, text_of
from slipstream.server.errors import ApiError, refused
from slipstream.server.messages.schemas import CountTokensRequest, MessagesRequest, MessageToolChoice, Turn
from slipstream.server.schemas import ChatRequest

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SKIPPED = ("thinking", "redacted_thinking")  # of an earlier answer: templates leave it out
_TEXT = ("text",)


def to_chat(request: CountTokensRequest) -> ChatRequest:
    """Raises ApiError (400)."""
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": text_of(request.system, _TEXT, "system")})
    for index, turn in enumerate(request.messages):
        _add(messages, turn, f"messages[{index}].content")
    if not messages:
        raise ApiError(
            400, f"messages: has only {' and '.join(_SKIPPED)}, accepted: a message with text", param="messages"
        )
    continues = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    choice = request.tool_choice
    generated: dict[str, Any] = {}
    if isinstance(request, MessagesRequest):
        generated = {"max_tokens": request.max_tokens, "stop": request.stop_sequences, "stream": request.stream}
    return chat_request(
        request,
        model=request.model,
        request_id=request.request_id,
        messages=messages,
        tools=[{"type": "function", "function": _function(tool)} for tool in request.tools or []] or None,
        tool_choice=_tool_choice(choice) if choice is not None and request.tools else None,
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=_response_format(request),
        reasoning_effort=request.output_config.effort if request.output_config is not None else None,
        chat_template_kwargs={**_thinking(request), **(request.chat_template_kwargs or {})} or None,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        **generated,
    )


def _function(tool: Any) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description is not None else {}
    return {"name": tool.name, **described, "parameters": tool.input_schema}


def _tool_choice(choice: MessageToolChoice) -> Any:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if not choice.name:
        raise ApiError(400, "tool_choice.name: is missing", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(request: CountTokensRequest) -> dict[str, Any] | None:
    form = request.output_config.format if request.output_config is not None else None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_}} if form else None


def _thinking(request: CountTokensRequest) -> dict[str, Any]:
    """`thinking` as the variable that templates of reasoning models know."""
    asked = (request.thinking or {}).get("type")
    return {} if asked is None else {"enable_thinking": asked != "disabled"}


def _add(messages: list[dict[str, Any]], turn: Turn, where: str) -> None:
    """Append a turn; results of tools become messages of their own, before its text."""
    if isinstance(turn.content, str):
        messages.append({"role": turn.role, "content": turn.content})
        return
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(turn.content):
        kind, at = block.get("type"), f"{where}[{index}]"
        if kind == "tool_use" and turn.role == "assistant":
            function = {"name": _string(block, "name", at), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": _string(block, "id", at), "type": "function", "function": function})
        elif kind == "tool_result" and turn.role == "user":
            result = block.get("content") or ""
            content = text_of(result if isinstance(result, str) else _blocks(result, at), _TEXT, f"{at}.content")
            messages.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", at), "content": content})
        elif kind not in _SKIPPED:
            with refused(where):
                texts.append(text_of_part(block, _TEXT, at))
    if texts or calls or not turn.content:
        message: dict[str, Any] = {"role": turn.role, "content": "".join(texts)}
        messages.append({**message, "tool_calls": calls} if calls else message)


def _blocks(value: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(value, list) and all(isinstance(block, dict) for block in value):
        return value
    raise ApiError(400, f"{where}.content: accepted: text, or a list of blocks", param=where)


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{where}.{name}: accepted: a string", param=where)
    return value
