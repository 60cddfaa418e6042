"""Arguments of calls that a model writes badly: every API answers, and as an object they are JSON for every program."""

from __future__ import annotations

import json
import urllib.request
from typing import Any, NoReturn

import pytest
from gateway import GatewayProcess
from slipstream.server.tools.arguments import MAX_ARGUMENT_DEPTH, read_arguments

SCHEMA = {"type": "object"}


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


DEEP = nested(5000)
TEXTS = {
    '{"a": 1}': {"a": 1},
    '{"a": NaN, "b": [-Infinity, 1e999, 0.5]}': {"a": None, "b": [None, None, 0.5]},
    r'{"\udfff": "\ud800x", "b": "\ud83e\udd8a"}': {"?": "?x", "b": "🦊"},
    DEEP: {},
    nested(MAX_ARGUMENT_DEPTH + 1): {},
    '{"a": ' + 5000 * "1" + "}": {},
    "[1]": {},
}


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


def asked(running: GatewayProcess, api: str, text: str, name: str = "f") -> dict[str, Any]:
    """The answer of a model that makes this call."""
    call = f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {text}}}</tool_call>'
    script, function = json.dumps({"pieces": [call]}), {"name": "f", "parameters": SCHEMA}
    talk = [{"role": "user", "content": script}]
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": talk, "tools": [{"type": "function", "function": function}]},
        "responses": {"input": script, "tools": [{"type": "function", **function}]},
        "messages": {"messages": talk, "tools": [{"name": "f", "input_schema": SCHEMA}], "max_tokens": 50},
    }
    body = json.dumps({"model": "hermes", **bodies[api]}).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{running.url}/v1/{api}", body, headers)) as reply:
        return json.loads(reply.read(), parse_constant=refuse)


def call_of(answer: dict[str, Any]) -> dict[str, Any]:
    if "choices" in answer:
        return answer["choices"][0]["message"]["tool_calls"][0]["function"]
    return answer["output"][0] if "output" in answer else answer["content"][0]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:16])
def test_every_api_answers(open_gateway: GatewayProcess, text: str) -> None:
    """Where arguments are text they are the model's own, as OpenAI says of them; an object has to be JSON."""
    for api in ("chat/completions", "responses"):
        assert call_of(asked(open_gateway, api, text))["arguments"] == text
    assert call_of(asked(open_gateway, "messages", text))["input"] == TEXTS[text]


@pytest.mark.parametrize("api", ["chat/completions", "responses", "messages"])
def test_half_a_surrogate_in_a_name_or_a_quoted_object(open_gateway: GatewayProcess, api: str) -> None:
    assert call_of(asked(open_gateway, api, "{}", name="f\ud800"))["name"] == "f?"
    call = call_of(asked(open_gateway, api, r'"{\"a\": \"\ud800\"}"'))
    assert call.get("input") == {"a": "?"} or call["arguments"] == '{"a": "?"}'


def test_what_is_no_json_is_refused() -> None:
    assert read_arguments("") == {} and read_arguments(nested(MAX_ARGUMENT_DEPTH)) == json.loads(nested(100))
    for text in ('{"a": ', DEEP, nested(MAX_ARGUMENT_DEPTH + 1), "[" * 100_000):
        with pytest.raises(ValueError):
            read_arguments(text)
