"""Fields of a request that the gateway does not know, or knows and does not serve. Pure functions.

An unknown field is ignored and named in the answer's `warning` header, so that a client of another server changes only
its base URL; --strict refuses it. A known field that would change the answer is refused with the reason.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from slipstream.server.errors import ApiError
from slipstream.server.schemas import Message

MAX_NAMED_FIELDS = 16  # of the unknown ones, in a header and a log line
_MAX_NAME_CHARS = 64
# of answers, which clients send back as they got them; a template that has no use for one leaves it out
_MESSAGE_KEYS = frozenset({"reasoning_content", "reasoning", "refusal", "annotations", "function_call"})
_TEXT_MODEL = "this is a text model"

# field -> values that change nothing, why no others are served
NOT_SERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "audio": ((), _TEXT_MODEL),
    "modalities": (([], ["text"]), _TEXT_MODEL),
    "mm_processor_kwargs": (({},), _TEXT_MODEL),
    "web_search_options": ((), "the gateway searches nothing"),
    "spaces_between_special_tokens": ((True,), "special tokens are shown as they are"),
    "kv_transfer_params": (({},), "prompts are computed where they are answered"),
    "chat_template": ((), "a template is code; the operator names one with --chat-template"),
    "background": ((False,), "an answer is made while its client waits"),
    "conversation": ((), "conversations are kept as answers; use previous_response_id"),
    "prompt_embeds": ((), "a prompt is text or token ids"),
    "prompt": ((), "no templates of prompts are kept; send what one makes of its variables"),  # of the Responses API
    "mcp_servers": (([],), "tools are run by the client"),  # of the Messages API, as the next
    "container": ((), "tools are run by the client"),
}


def unknown_fields(body: BaseModel, is_strict: bool) -> list[str]:
    """Paths of the fields that are ignored; null is as good as none. Raises ApiError (400) for one that is refused."""
    found: list[str] = []
    for name, value in (body.model_extra or {}).items():
        if name in NOT_SERVED:
            _check_not_served(name, value)
        elif value is not None:
            found.append(name)
    found += _nested(body)
    _check_strict(body, found, is_strict)
    return found


def unknown_message_keys(
    body: BaseModel, messages: Sequence[Message], words: Collection[str], is_strict: bool
) -> list[str]:
    """Paths of the messages' keys that neither this API nor the chat template has a use for.

    words: all words of the template. Raises ApiError (400) if such keys are refused.
    """
    found = [
        f"messages[{index}].{name}"
        for index, message in enumerate(messages)
        for name, value in (message.model_extra or {}).items()
        if value is not None and name not in _MESSAGE_KEYS and name not in words
    ]
    _check_strict(body, found, is_strict)
    return found


def _check_strict(body: BaseModel, found: Sequence[str], is_strict: bool) -> None:
    if found and is_strict:
        path = found[0]
        raise ApiError(400, f"{shown(path)}: is not a known parameter{_hint(body, path)} (--strict)", param=shown(path))


def warning(body: BaseModel, fields: list[str]) -> str:
    """What a header says of ignored fields: ASCII, of a bounded length."""
    named = [shown(path) + _hint(body, path) for path in fields[:MAX_NAMED_FIELDS]]
    if len(fields) > MAX_NAMED_FIELDS:
        named.append(f"{len(fields) - MAX_NAMED_FIELDS} more")
    return f"ignored parameters: {', '.join(named)}"


def shown(path: str) -> str:
    text = path.encode("ascii", "backslashreplace").decode()
    text = "".join(char if char.isprintable() and char not in '"\\' else "?" for char in text)
    return text if len(text) <= _MAX_NAME_CHARS else text[: _MAX_NAME_CHARS - 3] + "..."


def _hint(body: BaseModel, path: str) -> str:
    kind, name = type(body), path
    if path.startswith("messages["):
        kind, name = Message, path.partition(".")[2]
    if len(name) > _MAX_NAME_CHARS or "." in name:
        return ""
    close = difflib.get_close_matches(name, list(kind.model_fields), n=1, cutoff=0.8)
    return f" (did you mean {close[0]}?)" if close else ""


def _check_not_served(name: str, value: Any) -> None:
    neutral, reason = NOT_SERVED[name]
    if value is not None and value not in neutral:
        accepted = " or ".join(map(repr, neutral)) or "null, or leave it out"
        raise ApiError(400, f"{name}: not served, because {reason}; accepted: {accepted}", param=name)


def _nested(body: BaseModel) -> Iterator[str]:
    """Unknown fields of the objects inside. Not of messages, whose further keys may be for the chat template."""
    for name in type(body).model_fields:
        if name != "messages":
            yield from _inside(getattr(body, name), name)


def _inside(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from (f"{path}.{name}" for name, found in (value.model_extra or {}).items() if found is not None)
        for name in type(value).model_fields:
            yield from _inside(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for index, entry in enumerate(value):
            yield from _inside(entry, f"{path}[{index}]")
