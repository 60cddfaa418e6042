"""Anthropic's Messages API with Anthropic's own client: text, tools, events, counting; and what is refused."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import openai
import pytest
from gateway import GatewayProcess
from patience import PATIENCE_S

if TYPE_CHECKING:
    import anthropic

TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
CALLS = ["Let me see.", '<tool_call>{"name": "f", "argum', 'ents": {"a": 1}}</tool_call>']
MESSAGES = "/v1/messages"
ASKED = {"model": "hermes", "max_tokens": 50}


@pytest.fixture(scope="module", autouse=True)
def client_library() -> None:
    """Imported where these tests run, not where they are collected, which every worker does: it takes two seconds."""
    global anthropic
    anthropic = pytest.importorskip("anthropic")


def client_of(gateway: GatewayProcess, key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def scripted(fake_gateway: GatewayProcess) -> anthropic.Anthropic:
    """Its key is in the header x-api-key."""
    return client_of(fake_gateway, "sk-right")


def user(**script: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": json.dumps(script)}]


def test_a_text_is_the_chats(gateway: GatewayProcess, client: openai.OpenAI) -> None:
    own = client_of(gateway, "not-needed")
    turns = [{"role": "user", "content": "add"}]
    chat = client.chat.completions.create(
        model="llm", messages=[{"role": "system", "content": "Be short"}, *turns], temperature=0, max_tokens=8
    )
    text, usage = chat.choices[0].message.content, chat.usage
    extra = {"extra_body": {"temperature": 0}}
    answer = own.messages.create(model="llm", system="Be short", messages=turns, max_tokens=8, **extra)
    assert answer.content[0].text == text and answer.stop_reason == "max_tokens"
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == usage.prompt_tokens
    assert answer.usage.output_tokens == 8
    with own.messages.stream(model="llm", system="Be short", messages=turns, max_tokens=8, **extra) as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 8
    word = text.split()[-1]
    stopped = own.messages.create(
        model="llm", messages=turns, max_tokens=8, stop_sequences=[word], system="Be short", **extra
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    counted = own.messages.count_tokens(model="llm", system="Be short", messages=turns)
    assert counted.input_tokens == usage.prompt_tokens


def test_answers_and_errors_name_their_request(scripted: anthropic.Anthropic) -> None:
    """In the header that Anthropic's clients read, and hand on."""
    header = {"x-request-id": "turn-7"}
    asked = {**ASKED, "messages": user(pieces=["Hello"]), "extra_headers": header}
    assert scripted.messages.create(**asked)._request_id == "turn-7"
    with scripted.messages.stream(**asked) as stream:
        assert stream.request_id == "turn-7"
    with pytest.raises(anthropic.NotFoundError) as error:
        scripted.messages.create(**{**asked, "model": "nobody"})
    assert error.value.request_id == "turn-7"


def test_tools_are_called_and_answered(scripted: anthropic.Anthropic) -> None:
    answer = scripted.messages.create(**ASKED, messages=user(pieces=CALLS), tools=[TOOL])
    text, call = answer.content
    assert (text.text, call.name, call.input, answer.stop_reason) == ("Let me see.", "f", {"a": 1}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": json.dumps({"pieces": ["sunny"]})}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
        {"role": "user", "content": [result]},
    ]
    assert scripted.messages.create(**ASKED, messages=turns, tools=[TOOL]).content[0].text == "sunny"


def test_events_make_up_the_answer(scripted: anthropic.Anthropic) -> None:
    with scripted.messages.stream(**ASKED, messages=user(pieces=CALLS), tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    assert [block.type for block in final.content] == ["text", "tool_use"] and final.content[1].input == {"a": 1}
    assert final.stop_reason == "tool_use" and final.usage.input_tokens == 5


def test_an_answer_is_continued(scripted: anthropic.Anthropic) -> None:
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": json.dumps({"pieces": ["b"]})}]
    assert scripted.messages.create(**ASKED, messages=turns).content[0].text == "b"


def test_faults(scripted: anthropic.Anthropic, fake_gateway: GatewayProcess) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        client_of(fake_gateway, "sk-wrong").messages.create(**ASKED, messages=user())
    with pytest.raises(anthropic.NotFoundError):
        scripted.messages.create(**{**ASKED, "model": "no"}, messages=user())
    with pytest.raises(anthropic.APIStatusError, match="it broke"):
        list(scripted.messages.create(**ASKED, messages=user(pieces=["a"], fail=["", "it broke"]), stream=True))


@pytest.mark.parametrize(
    ("path", "body", "key", "status", "kind"),
    [
        (MESSAGES, {**ASKED, "model": "no", "messages": user()}, "sk-right", 404, "not_found_error"),
        (MESSAGES, {**ASKED, "messages": []}, "sk-right", 400, "invalid_request_error"),
        (MESSAGES, {**ASKED, "messages": user(), "top_p": 3}, "sk-right", 400, "invalid_request_error"),
        (MESSAGES, {**ASKED, "messages": user()}, "sk-wrong", 401, "authentication_error"),
        (MESSAGES, {**ASKED, "messages": "\ud800"}, "sk-right", 400, "invalid_request_error"),
        (f"{MESSAGES}/count_tokens", {"model": "hermes"}, "sk-right", 400, "invalid_request_error"),
        (f"{MESSAGES}/batches", {}, "sk-right", 404, "not_found_error"),
        ("/v1/completions", {"model": "hermes"}, "sk-right", 400, None),
    ],
)
def test_errors_have_the_form_of_their_api(
    fake_gateway: GatewayProcess, path: str, body: dict, key: str, status: int, kind: str | None
) -> None:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(fake_gateway.url + path, json.dumps(body).encode(), headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    told = json.load(refused.value)
    assert refused.value.code == status and told["error"]["message"]
    assert told.get("type") == (kind and "error")
    assert told["error"]["type"] == (kind or "invalid_request_error")


def test_an_error_of_a_connection_has_it_too(fake_gateway: GatewayProcess) -> None:
    head = f"POST {MESSAGES}?beta=true HTTP/1.1\r\nhost: localhost\r\n" + "a: b\r\n" * 2000
    with socket.create_connection(("127.0.0.1", fake_gateway.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode())
        answer = connection.recv(4096)
    assert b" 431 " in answer
    told = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")


def test_an_error_in_a_stream_is_of_anthropics_types(scripted: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.APIStatusError) as failed:
        list(scripted.messages.create(**ASKED, messages=user(pieces=["a"], fail=["", "it broke"]), stream=True))
    assert failed.value.body["type"] == "error" and failed.value.body["error"]["type"] == "api_error"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "at least 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "this is a text model"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "messages: has only thinking"),
        ({"metadata": {"user_id": "x" * 513}}, "metadata.user_id: .*at most 512"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: is missing"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "no tool is named 'g'"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
        ({"stop_sequences": ["a"] * 65}, "at most 64"),
        ({"extra_body": {"top_p": 3}}, "accepted: a number from 0 to 1"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers: not served"),
        ({"extra_body": {"container": "x"}}, "container: not served"),
    ],
)
def test_wrong_requests(scripted: anthropic.Anthropic, fields: dict, words: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words):
        scripted.messages.create(**{**ASKED, "messages": user(), **fields})
