"""A request of the Responses API -> the chat that it means. Pure functions."""

from __future__ import annotations

from typing import Any

from slipstream.server.chat_turn import chat_request, text_of
from slipstream.server.errors import ApiError
from slipstream.server.responses.schemas import NamedFunction, ResponsesRequest
from slipstream.server.schemas import ChatRequest

Messages = list[dict[str, Any]]
_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_SKIPPED = ("reasoning",)  # of an earlier answer: templates leave it out
_LOGPROBS = "message.output_text.logprobs"


def to_chat(request: ResponsesRequest, earlier: Messages) -> ChatRequest:
    """earlier: the messages of previous_response_id. Raises ApiError (400)."""
    _check_logprobs(request)
    instructions: Messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    choice = request.tool_choice
    if isinstance(choice, NamedFunction):
        choice = {"type": "function", "function": {"name": choice.name}}  # type: ignore[assignment]
    is_cut = request.truncation == "auto" and request.truncate_prompt_tokens is None
    text = request.text
    return chat_request(
        request,
        model=request.model,
        request_id=request.request_id,
        messages=[*instructions, *earlier, *input_messages(request)],
        max_completion_tokens=request.max_output_tokens,
        stream=request.stream,
        tools=[{"type": "function", "function": _function(tool)} for tool in request.tools or []] or None,
        tool_choice=choice if request.tools else None,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request),
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        verbosity=text.verbosity if text is not None else None,
        chat_template_kwargs=request.chat_template_kwargs,
        truncate_prompt_tokens=-1 if is_cut else request.truncate_prompt_tokens,
    )


def _check_logprobs(request: ResponsesRequest) -> None:
    """Raises ApiError (400) for log-probabilities, which a client would take from an empty list."""
    instead = "log-probabilities are not in this API's answers; use /v1/chat/completions"
    if request.top_logprobs:
        raise ApiError(400, f"top_logprobs: got {request.top_logprobs}, accepted: 0; {instead}", param="top_logprobs")
    if _LOGPROBS in (request.include or ()):
        raise ApiError(400, f"include: got {_LOGPROBS!r}; {instead}", param="include")


def _function(tool: Any) -> dict[str, Any]:
    return tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    form = request.text.format if request.text is not None else None
    if form is None or form.type != "json_schema":
        return {"type": form.type} if form is not None else None
    if form.schema_ is None:
        raise ApiError(400, "text.format.schema: is missing", param="text.format.schema")
    named = {"name": form.name or "answer", "schema": form.schema_, "strict": form.strict}
    return {"type": "json_schema", "json_schema": named}


def input_messages(request: ResponsesRequest) -> Messages:
    """The input as messages of a chat: calls join the assistant's message before them."""
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    messages: Messages = []
    for index, item in enumerate(request.input):
        _add(messages, item, f"input[{index}]")
    return messages


def _add(messages: Messages, item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise ApiError(400, f"{where}.role: accepted: {', '.join(_ROLES)}", param=f"{where}.role")
        content = text_of(_content(item.get("content"), f"{where}.content"), _TEXT_PARTS, f"{where}.content")
        messages.append({"role": _ROLES[role], "content": content})
    elif kind == "function_call":
        call: dict[str, Any] = {"id": _string(item, "call_id", where), "type": "function"}
        call["function"] = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = text_of(_content(item.get("output"), f"{where}.output"), _TEXT_PARTS, f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": output})
    elif kind not in _SKIPPED:
        accepted = "accepted: message, function_call, function_call_output, reasoning"
        raise ApiError(400, f"{where}.type: got {str(kind)[:64]!r}, {accepted}", param=f"{where}.type")


def _content(value: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, dict) for part in value)):
        return value
    raise ApiError(400, f"{where}: accepted: text, or a list of parts", param=where)


def _string(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{where}.{name}: accepted: a string", param=f"{where}.{name}")
    return value
