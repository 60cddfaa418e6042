"""OpenAI's settings -> the engine's `sampling_parameters` (docs/contracts.md). Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from slipstream.core.regex_syntax import UnenforcedError
from slipstream.core.schema_relaxing import enforceable
from slipstream.core.setting_values import MAX_INT32
from slipstream.core.settings import IN_SPECULATION, SETTINGS
from slipstream.server.errors import ApiError
from slipstream.server.schemas import NamedRequest, ResponseFormat, Sampling, passed_on

PASSED_NAMES = tuple(setting.name for setting in passed_on(SETTINGS))
_SPECULATION = frozenset(setting.name for setting in SETTINGS if setting.openai == IN_SPECULATION)
UNLIMITED_TOKENS = MAX_INT32
# vLLM's fields before structured_outputs -> the key there
_OLDER_GUIDES = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_RENAMED = {  # the engine's name -> those of chats, of responses and of Anthropic's messages
    "logprobs": ("top_logprobs",),
    "max_tokens": ("max_completion_tokens", "max_output_tokens"),
    "prompt": ("messages", "input"),
    "stop": ("stop_sequences",),
}


def sampling_parameters(request: Sampling, max_tokens: int | None, response_format: ResponseFormat | None) -> dict:
    """The settings that the client gave, the length and the grammar. Raises ApiError for two grammars at once."""
    settings: dict[str, Any] = {name: value for name in PASSED_NAMES if (value := getattr(request, name)) is not None}
    if request.stop:  # "" and [] mean none, as with OpenAI
        settings["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    if request.speculation is not None:
        for name in request.speculation:
            if name not in _SPECULATION:  # nothing gets past the gateway's checks
                accepted = ", ".join(sorted(_SPECULATION))
                raise ApiError(400, f"{name}: unknown setting of speculation, accepted: {accepted}", param=name)
        settings.update(request.speculation)
    if max_tokens is not None:
        settings["max_tokens"] = max_tokens
    if request.prompt_logprobs is not None:
        settings["prompt_logprobs"] = request.prompt_logprobs
    named = [(name, value) for name in _OLDER_GUIDES if (value := getattr(request, name)) is not None]
    guides = [
        ("structured_outputs", settings.get("structured_outputs")),
        ("response_format", guide_of(response_format)),
    ]
    guides += [(name, {_OLDER_GUIDES[name]: value}) for name, value in named]
    given = [(name, guide) for name, guide in guides if guide is not None]
    if len(given) > 1:
        names = " and ".join(name for name, _ in given)
        raise ApiError(400, f"{given[-1][0]}: {names} are given together, accepted: one of them", param=given[-1][0])
    for name, guide in given:
        if guide.get("choice") == []:
            field = name if name in _OLDER_GUIDES else f"{name}.choice"
            raise ApiError(400, f"{field}: got [], accepted: a list of at least one text", param=field)
        settings["structured_outputs"] = guide
    return settings


@contextmanager
def naming_fields_as_asked(request: NamedRequest) -> Iterator[None]:
    """Rename the parameter in the engine's errors, if the client gave it by another name, and so in the message."""
    try:
        yield
    except ApiError as error:
        ours = error.param or ""
        fields = type(request).model_fields
        given = (name for name in _RENAMED.get(ours, ()) if name in fields and getattr(request, name) is not None)
        theirs = _grammar_of(request) if ours == "structured_outputs" else next(given, "")
        if theirs and error.message.startswith(f"{ours}: "):
            error.param = theirs
            error.message = theirs + error.message.removeprefix(ours)
        raise


def _grammar_of(request: NamedRequest) -> str:
    """The field that asks for a grammar; without one it is that of a tool's schema."""
    for name in ("structured_outputs", *_OLDER_GUIDES):
        if getattr(request, name, None) is not None:
            return name
    if guide_of(getattr(request, "response_format", None)) is not None:
        return "response_format"
    for name in ("text", "output_config"):  # of responses and of Anthropic's messages
        form = getattr(getattr(request, name, None), "format", None)
        if form is not None and form.type != "text":
            return f"{name}.format"
    return "tools" if getattr(request, "tools", None) else "functions"


def guide_of(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    """The grammar of a response format, as vLLM's structured_outputs."""
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return {"json_object": True}
    if response_format.type == "structural_tag":
        parts = {name: getattr(response_format, name) for name in ("format", "structures", "triggers")}
        return {"structural_tag": {"type": "structural_tag", **{k: v for k, v in parts.items() if v is not None}}}
    if response_format.json_schema is None or response_format.json_schema.schema_ is None:
        message = "response_format.json_schema: missing, accepted: an object with `name` and `schema`"
        raise ApiError(400, message, param="response_format.json_schema")
    schema = response_format.json_schema.schema_
    if response_format.json_schema.strict is False:
        with suppress(UnenforcedError):  # the engine refuses it with the reason
            schema = enforceable(schema)
    return {"json": schema}
