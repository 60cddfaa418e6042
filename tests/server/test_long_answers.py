"""Answers of many tokens in the forms that keep the whole text: time grows with their length, not with its square."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from slipstream.server.chat import whole_message
from slipstream.server.messages.answer import MessageWriter
from slipstream.server.messages.schemas import MessagesRequest
from slipstream.server.responses.answer import ResponseWriter
from slipstream.server.responses.schemas import ResponsesRequest
from slipstream.server.tools.json_call import CallArguments, CallStart, Content, Event, Reasoning
from slipstream.server.tools.select import ToolUse

NUM_TOKENS, TOKEN = 100_000, "x" * 80
LONG = TOKEN * NUM_TOKENS
ARGUMENTS = [CallArguments('{"a": "'), *[CallArguments(TOKEN)] * NUM_TOKENS, CallArguments('"}')]
EVENTS: dict[str, list[Event]] = {
    "text": [Content(TOKEN)] * NUM_TOKENS,
    "thoughts": [Reasoning(TOKEN)] * NUM_TOKENS,
    "call": [CallStart("f"), *ARGUMENTS],
}


class Reader:
    """Gives each event as a response of its own."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = iter(events)
        self._left = len(events)
        self.reason = self.stop_string = ""
        self.usage = SimpleNamespace(to_json=lambda: None)

    def read(self, response: object) -> list[Event]:
        self._left -= 1
        self.reason = "" if self._left else "stop"
        return [next(self._events)]


def responses(reader: Any) -> ResponseWriter:
    request = ResponsesRequest(model="m", input="x")
    return ResponseWriter(request, reader, ToolUse(make_id=lambda: "c"), lambda body: None)


def messages(reader: Any) -> MessageWriter:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    return MessageWriter(MessagesRequest.model_validate(body), reader, ToolUse(make_id=lambda: "c"))


def of_responses(body: dict[str, Any]) -> object:
    (item,) = body["output"]
    return json.loads(item["arguments"]) if item["type"] == "function_call" else item["content"][0]["text"]


def of_messages(body: dict[str, Any]) -> object:
    (block,) = body["content"]
    return block["input"] if block["type"] == "tool_use" else block[block["type"]]


FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[dict[str, Any]], object]]] = {
    "responses": (responses, of_responses),
    "messages": (messages, of_messages),
}


@pytest.mark.parametrize("kind", EVENTS)
@pytest.mark.parametrize("form", FORMS)
def test_the_whole_text_is_put_together_once(form: str, kind: str) -> None:
    make, read = FORMS[form]
    writer = make(Reader(EVENTS[kind]))
    start = time.process_time()
    for _ in EVENTS[kind]:
        writer.response(SimpleNamespace())
    assert time.process_time() - start < 4.0, "10 to 100 s, where each token copies what is before it"
    assert read(writer.body) == ({"a": LONG} if kind == "call" else LONG)


class OneParser:
    def feed(self, text: str) -> list[Event]:
        return [CallStart("f"), *ARGUMENTS, CallStart("g"), CallArguments("{}")]

    def finish(self) -> list[Event]:
        return []


def test_arguments_of_a_whole_answer_are_put_together_once() -> None:
    start = time.process_time()
    message, _ = whole_message("", ToolUse(make_parser=OneParser, make_id=lambda: "c"))
    assert time.process_time() - start < 2.0
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"a": LONG}, {}]
