"""Messages of a chat as templates expect them: text in one piece, the arguments of a tool's call as an object.

Pure functions, for the gateway and for the library: both read the same messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.core.errors import RequestError

TEMPLATE_FOLDER = "additional_chat_templates"  # of a checkpoint: chat templates beside the usual one, as for tools
_TEXT_KINDS = ("text",)


class ArgumentObject(dict[str, Any]):
    """Arguments of a call: an object to templates that read it (Qwen, Llama, GLM), and the text that the client sent to
    templates that join it to more text (DeepSeek)."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, behind: str) -> str:
        return self._text + behind

    def __radd__(self, before: str) -> str:
        return before + self._text


def for_template(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A copy of a message with its content and its calls in that form. Raises RequestError that names the part.

    A part of the content without a type is a text.
    """
    read = dict(message)
    content = read.get("content")
    if content is not None and not isinstance(content, str):
        parts = content if isinstance(content, Sequence) else [content]
        typed = [{"type": "text", **part} if isinstance(part, Mapping) else part for part in parts]
        read["content"] = text_of_parts(typed, _TEXT_KINDS, f"{where}.content")
    if isinstance(calls := read.get("tool_calls"), Sequence):
        read["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]
    return read


def text_of_parts(parts: str | Sequence[Any], kinds: Sequence[str], where: str) -> str:
    """The text of a content: itself, or that of its parts. Raises RequestError for a part that is of none of kinds."""
    if isinstance(parts, str):
        return parts
    return "".join(text_of_part(part, kinds, f"{where}[{number}]") for number, part in enumerate(parts))


def text_of_part(part: object, kinds: Sequence[str], where: str) -> str:
    """The text of one part. Raises RequestError for one that is of none of the kinds."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind in kinds and isinstance(text := part.get("text"), str):
        return text
    accepted = f"accepted: parts of type {', '.join(kinds)} with a text; this is a text model"
    raise RequestError(where, f"got type {str(kind)[:64]!r}, {accepted}")


def _read_call(call: Any, where: str) -> Any:
    """A call whose arguments are an object, also where they are JSON as OpenAI's API has them."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"] or "{}"
    try:
        values = json.loads(text)
        arguments = ArgumentObject(values, text) if isinstance(values, dict) else values
        return {**call, "function": {**function, "arguments": arguments}}
    except (ValueError, RecursionError):
        raise RequestError(f"{where}.function.arguments", "is not JSON") from None
