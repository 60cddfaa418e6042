"""Messages of a chat are read alike by the gateway and by the library, mistakes included."""

from __future__ import annotations

from typing import Any

import pytest
from slipstream.core.errors import RequestError
from slipstream.engine.prompt_forms import read_conversations
from slipstream.server.chat import templated
from slipstream.server.errors import ApiError
from slipstream.server.messages.input import to_chat as messages_chat
from slipstream.server.messages.schemas import MessagesRequest
from slipstream.server.responses.input import to_chat as responses_chat
from slipstream.server.responses.schemas import ResponsesRequest
from slipstream.server.schemas import Message

PARTS = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "hello"},
        {"role": "user", "content": PARTS, "name": "n"},
        {"role": "user", "content": []},
        called(""),
        called('{"a": [1, {"b": null}]}'),
        called("[1]"),
    ],
)
def test_both_read_the_same(message: dict[str, Any]) -> None:
    [[of_library]] = read_conversations([message])
    of_gateway = templated(Message.model_validate(message), 0)
    assert of_library == of_gateway and list(of_library) == list(of_gateway)


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000, "1" * 5000])
def test_both_refuse_the_same(arguments: str) -> None:
    message = called(arguments)
    with pytest.raises(RequestError) as of_library:
        read_conversations([message])
    with pytest.raises(ApiError) as of_gateway:
        templated(Message.model_validate(message), 0)
    assert of_gateway.value.message == str(of_library.value)
    assert of_gateway.value.param == of_library.value.field == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize("part", [{"type": "image"}, {"type": "text"}, {"type": ["text"], "text": "x"}])
def test_a_part_that_is_no_text_is_refused_in_the_same_words(part: dict[str, Any]) -> None:
    turn = {"role": "user", "content": [*PARTS, part]}
    told = r"\.content\[2\]: got type .*, accepted: parts of type .*text with a text; this is a text model"
    with pytest.raises(RequestError, match=rf"^messages\[0\]{told}"):
        read_conversations([turn])
    with pytest.raises(ApiError, match=rf"messages\[0\]{told}") as refused:
        messages_chat(MessagesRequest.model_validate({"model": "m", "max_tokens": 1, "messages": [turn]}))
    assert refused.value.param == "messages[0].content"
    with pytest.raises(ApiError, match=rf"input\[0\]{told}") as refused:
        responses_chat(ResponsesRequest.model_validate({"model": "m", "input": [turn]}), [])
    assert refused.value.param == "input[0].content"


def test_a_part_of_the_library_needs_no_type() -> None:
    [[message]] = read_conversations([{"role": "user", "content": [{"text": "hel"}, *PARTS[1:]]}])
    assert message["content"] == "hello"
    with pytest.raises(RequestError, match=r"^messages\[0\]\.content\[1\]: got type 'int'"):
        read_conversations([{"role": "user", "content": [{"text": "hel"}, 5]}])
