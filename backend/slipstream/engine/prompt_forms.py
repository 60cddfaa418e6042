"""The forms of prompts and of chats that callers of the library may give: those of vLLM and Hugging Face, by name.

Pure functions, for engine/llm.py. They must not know the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from slipstream.core.chat_messages import for_template
from slipstream.core.errors import RequestError
from slipstream.core.settings import BY_NAME

Prompt = str | Sequence[int] | Mapping[str, Any]  # a mapping has KEYS
Message = Mapping[str, Any]  # {"role": ..., "content": ...}

KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_FORMS = 'a text, a list of token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these'
_WITH_CONTENT = ("system", "developer", "user")
_INSTEAD = {
    "input_ids": "prompt_token_ids",
    "attention_mask": "no padding, so no mask",
    "encoder_prompt": "decoder models only",
    "prompt_embeds": "text or token ids",
    "multi_modal_data": "text alone, as this is a text model",
}


@dataclass(frozen=True)
class ReadPrompt:
    """value: text, or token ids. cache_salt: only prompts with the same one share cached prefixes."""

    value: str | list[int]
    cache_salt: str = ""


def read_prompts(prompts: Prompt | Iterable[Prompt]) -> list[ReadPrompt]:
    """One prompt, or several. Raises RequestError that names what is not accepted."""
    if isinstance(prompts, str | bytes | Mapping):
        return [read_prompt(prompts)]
    entries = list(_iterated(prompts))
    if entries and _is_integer(entries[0]):
        return [read_prompt(entries)]
    return [read_prompt(entry) for entry in entries]


def read_prompt(prompt: object) -> ReadPrompt:
    """Raises RequestError for a form that is not accepted."""
    if isinstance(prompt, Mapping):
        return _read_mapping(prompt)
    return ReadPrompt(_text_or_ids("prompt", prompt))


def _read_mapping(prompt: Mapping[str, Any]) -> ReadPrompt:
    """vLLM's TextPrompt and TokensPrompt. The text beside token ids is what they were made of, as with vLLM."""
    for name, value in prompt.items():
        if name not in KEYS and value is not None:
            told = _INSTEAD.get(name, ", ".join(KEYS))
            raise RequestError(str(name)[:64], f"is not served as a part of a prompt, accepted: {told}")
    text, token_ids, salt = (prompt.get(name) for name in KEYS)
    if text is not None and not isinstance(text, str):
        raise RequestError("prompt", f"got {type(text).__name__}, accepted: a text")
    if salt is not None and not isinstance(salt, str):
        raise RequestError("cache_salt", f"got {type(salt).__name__}, accepted: a text")
    if salt is not None:
        BY_NAME["cache_salt"].kind.check("cache_salt", salt)
    if token_ids is not None and isinstance(token_ids, str):
        raise RequestError("prompt_token_ids", "got str, accepted: a list of integers")
    value = token_ids if token_ids is not None else text
    if value is None:
        raise RequestError("prompt", f"is missing, accepted: {_FORMS}")
    return ReadPrompt(_text_or_ids("prompt_token_ids" if token_ids is not None else "prompt", value), salt or "")


def _text_or_ids(name: str, value: object) -> str | list[int]:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        raise RequestError(name, f"got bytes, accepted: {_FORMS}")
    entries = list(_iterated(value, name))
    for entry in entries:
        if not _is_integer(entry):
            raise RequestError(name, f"got a list with {type(entry).__name__}, accepted: {_FORMS}")
    return [index(entry) for entry in entries]


def _iterated(value: Any, name: str = "prompts") -> Iterable[Any]:
    try:
        return value.tolist() if hasattr(value, "tolist") else iter(value)  # arrays and tensors of token ids
    except TypeError:
        raise RequestError(name, f"got {type(value).__name__}, accepted: {_FORMS}") from None


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


# ---------------------------------------------------------------- chats


def read_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[dict[str, Any]]]:
    """One conversation, or several, as templates expect them: text in one piece, a call's arguments as an object.

    Raises RequestError that names the message.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        told = f"got {type(messages).__name__}, accepted: a list of messages, or a list of these"
        raise RequestError("messages", told)
    entries: list[Any] = list(messages)
    conversations = [entries] if entries and isinstance(entries[0], Mapping) else entries
    return [_read_conversation(conversation) for conversation in conversations]


def _read_conversation(conversation: object) -> list[dict[str, Any]]:
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not conversation:
        told = type(conversation).__name__ if conversation else "an empty conversation"
        raise RequestError("messages", f"got {told}, accepted: a list of at least one message")
    return [_read_message(message, f"messages[{number}]") for number, message in enumerate(conversation)]


def _read_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(where, 'is no message, accepted: {"role": text, "content": text}')
    if message.get("content") is None and message["role"] in _WITH_CONTENT:
        raise RequestError(f"{where}.content", "is missing, accepted: a text or a list of text parts")
    return for_template(message, where)
