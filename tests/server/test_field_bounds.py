"""A body that is wrong in very many places: refused for one of them, at the cost of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from slipstream.core.setting_values import MAX_ENTRIES
from slipstream.server.field_bounds import MAX_JSON_DEPTH
from slipstream.server.messages.schemas import CountTokensRequest, MessagesRequest
from slipstream.server.responses.schemas import ResponsesRequest
from slipstream.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)

REQUESTS = (
    *(ChatRequest, CompletionRequest, DetokenizeRequest, EmbeddingRequest, RerankRequest, ScoreRequest),
    *(TokenizeRequest, CountTokensRequest, MessagesRequest, ResponsesRequest),
)
COUNT, MOST_ERRORS = 1000, 8
CHAT = {"model": "llm", "messages": [{"role": "user", "content": "x"}]}
PROMPT = {"model": "llm", "prompt": "x"}
INFINITE = [float("inf")] * COUNT


def errors_of(kind: type[BaseModel], body: dict[str, Any]) -> list[Any]:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(json.loads(json.dumps(body)))
    return caught.value.errors()


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (CompletionRequest, {**PROMPT, "prompt": [{}] * COUNT}, "prompt"),
        (CompletionRequest, {**PROMPT, "prompt": [[""] * COUNT]}, "prompt"),
        (CompletionRequest, {**PROMPT, "logit_bias": dict.fromkeys(map(str, range(2 * COUNT)), "")}, "logit_bias"),
        (
            CompletionRequest,
            {**PROMPT, "logit_bias": dict.fromkeys(map(str, range(MAX_ENTRIES + 1)), 0.5)},
            "logit_bias",
        ),
        (CompletionRequest, {**PROMPT, "metadata": dict.fromkeys(map(str, range(COUNT)), 1)}, "metadata"),
        (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": [{}] * 10}] * COUNT}, "messages"),
        (ChatRequest, {**CHAT, "documents": [{"a": INFINITE}] * 10}, "documents"),
        (
            ChatRequest,
            {**CHAT, "chat_template_kwargs": {"a": dict.fromkeys(map(str, range(COUNT)), INFINITE[0])}},
            "chat",
        ),
        (DetokenizeRequest, {"model": "llm", "tokens": [{}] * COUNT}, "tokens"),
        (ResponsesRequest, {"model": "llm", "input": [{"a": INFINITE}] * 10}, "input"),
        (
            MessagesRequest,
            {**CHAT, "max_tokens": 1, "messages": [{"role": "user", "content": [1] * COUNT}]},
            "messages",
        ),
    ],
)
def test_a_body_has_few_errors(kind: type[BaseModel], body: dict[str, Any], field: str) -> None:
    found = errors_of(kind, body)
    assert len(found) <= MOST_ERRORS and all(error["loc"][0].startswith(field) for error in found), found[:3]


def _lists(schema: Any, name: str) -> Iterator[tuple[str, bool]]:
    """Each list within a schema, and whether it ends at its first error."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield name, bool(schema.get("fail_fast"))
        for key, value in schema.items():
            if key not in ("serialization", "metadata"):
                yield from _lists(value, f"{name}.{key}")
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from _lists(value, name)


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_list_ends_at_its_first_error(kind: type[BaseModel]) -> None:
    found = list(_lists(kind.__pydantic_core_schema__, kind.__name__))
    assert not [name for name, is_fast in found if not is_fast]
    assert found, "lists are looked for where they are"


def test_json_is_finite_and_not_deep() -> None:
    nested: Any = 1.5
    for _ in range(MAX_JSON_DEPTH - 1):
        nested = [nested]
    body = {**CHAT, "chat_template_kwargs": {"a": nested[0]}}
    assert ChatRequest.model_validate(body).chat_template_kwargs == {"a": nested[0]}
    [error] = errors_of(ChatRequest, {**CHAT, "chat_template_kwargs": {"a": nested}})
    assert error["loc"] == ("chat_template_kwargs",) and str(MAX_JSON_DEPTH) in error["msg"]
    for number in (float("nan"), float("-inf")):
        [error] = errors_of(ChatRequest, {**CHAT, "chat_template_kwargs": {"a": [{"b": number}]}})
        assert "finite" in error["msg"]
