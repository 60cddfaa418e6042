"""Messages with a mistyped key: one without content is refused, and a key that nobody reads is named."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message as Headers
from pathlib import Path
from typing import Any

import pytest
from fake_triton import FakeTriton
from gateway import GatewayProcess
from slipstream.server.chat import templated
from slipstream.server.errors import ApiError
from slipstream.server.schemas import ChatRequest, Message
from slipstream.server.unknown_fields import unknown_message_keys, warning

SCRIPT = json.dumps({"pieces": ["Hel", "lo"]})
CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeTriton]:
    """A model whose template reads the key `flavour`."""
    folder = tmp_path_factory.mktemp("checkpoint")
    template = "{{ messages[-1].content }}{% if messages[-1]['flavour'] %}!{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with FakeTriton({"llm": {"model": str(folder)}}) as running:
        yield running


def post(
    running: GatewayProcess, path: str, more: dict[str, object] | None = None, **message: object
) -> tuple[int, dict[str, Any], Headers]:
    messages = [{"role": "user", "content": SCRIPT}, {"role": "user", **message}]
    body = {"model": "llm", "messages": messages, **(more or {})}
    headers = {"content-type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(running.url + path, json.dumps(body).encode(), headers)
        ) as reply:
            return reply.status, json.load(reply), reply.headers
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"], error.headers


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool", "assistant"])
@pytest.mark.parametrize("rest", [{}, {"content": None}, {"contnet": "What is 2+2?"}])
def test_a_message_without_content_is_refused(role: str, rest: dict[str, object]) -> None:
    with pytest.raises(ApiError, match=r"messages\[3\].content: is missing, accepted: a text") as refused:
        templated(Message.model_validate({"role": role, **rest}), 3)
    assert (refused.value.status_code, refused.value.param) == (400, "messages[3].content")
    assert refused.value.message.endswith("did you mean it by contnet?") == ("contnet" in rest)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "assistant", "content": None, "reasoning_content": "Hm, ", "reasoning": "Hm, "},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "retrieved"},
    ],
)
def test_what_needs_no_content(message: dict[str, object]) -> None:
    assert templated(Message.model_validate(message), 0)["content"] == ""


def test_keys_that_nobody_reads_are_named() -> None:
    message = {
        "role": "user",
        "content": "x",
        "flavour": 1,
        "colour": 2,
        "refusal": "No",
        "audio": None,
        "tool_cals": "y",
    }
    body = ChatRequest.model_validate({"model": "llm", "messages": [message]})
    keys = unknown_message_keys(body, body.messages, {"flavour"}, is_strict=False)
    assert keys == ["messages[0].colour", "messages[0].tool_cals"]
    told = "ignored parameters: messages[0].colour, messages[0].tool_cals (did you mean tool_calls?)"
    assert warning(body, keys) == told
    with pytest.raises(ApiError, match=r"messages\[0\].colour: is not a known parameter \(--strict\)") as refused:
        unknown_message_keys(body, body.messages, {"flavour"}, is_strict=True)
    assert refused.value.param == "messages[0].colour"
    assert unknown_message_keys(body, body.messages, {"flavour", "colour", "tool_cals"}, is_strict=True) == []


@pytest.mark.parametrize("is_strict", [False, True])
def test_clients_learn_of_them(triton: FakeTriton, tmp_path: Path, is_strict: bool) -> None:
    with GatewayProcess(triton.url, ["--log-level", "warning", *(["--strict"] if is_strict else [])]) as running:
        status, error, _ = post(running, CHAT, contnet=SCRIPT)
        assert status == 400
        assert error["param"] == ("messages[1].contnet" if is_strict else "messages[1].content")
        status, answer, headers = post(running, CHAT, content=SCRIPT, flavour="sweet")
        assert status == 200 and "warning" not in headers
        assert answer["choices"][0]["message"]["content"] == "Hello"
        status, answer, headers = post(running, CHAT, content=SCRIPT, colour="red")
        assert status == (400 if is_strict else 200)
        assert is_strict or "messages[1].colour" in headers["warning"]
        tools = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
        status, answer, headers = post(running, CHAT, tools, content=SCRIPT)
        assert status == 200 and "tools: the model's chat template does not show them" in headers["warning"]
        function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
        for path, more in (
            (CHAT, {"functions": [function], "function_call": "none"}),
            (
                "/v1/responses",
                {"messages": None, "input": SCRIPT, "tools": [{"type": "function", **function}], "tool_choice": "none"},
            ),
            (
                "/v1/messages",
                {"max_tokens": 9, "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "none"}},
            ),
        ):
            status, answer, headers = post(running, path, more, content=SCRIPT)
            assert status == 200, answer
            assert "tools: the model's chat template does not show them" in headers["warning"]
        status, error, headers = post(running, TOKENIZE, content=SCRIPT, colour="red")
        assert status == 400, "it has no tokenizer"
        assert ("--strict" in error["message"]) == is_strict and (is_strict or "colour" in headers["warning"])
