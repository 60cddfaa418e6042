"""A chat that was asked for in another API's form (responses/, messages/): in as a ChatRequest, out as events.

Both APIs translate; everything between (template, tools, grammar, limits, the engine) is that of /v1/chat/completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from slipstream.core.chat_messages import text_of_parts
from slipstream.server.catalog import Model
from slipstream.server.errors import ApiError, refused
from slipstream.server.generation import Response
from slipstream.server.sampling import PASSED_NAMES
from slipstream.server.schemas import ChatRequest, TurnRequest
from slipstream.server.token_ids import STOP_REASON
from slipstream.server.tools.json_call import Content, Event
from slipstream.server.tools.select import ToolUse
from slipstream.server.usage import Usage
from slipstream.server.validation import explain

MAX_INPUT_PARTS = 10_000  # items of an input, and parts of an item


def chat_request(request: TurnRequest, **fields: Any) -> ChatRequest:
    """The chat that a request means: its settings of the engine, and these fields. Raises ApiError (400)."""
    if request.n not in (None, 1):
        raise ApiError(400, f"n: got {request.n}, accepted: 1, as this API has one answer", param="n")
    settings = {name: value for name in PASSED_NAMES if (value := getattr(request, name)) is not None}
    given = {name: value for name, value in {**settings, **fields}.items() if value is not None}
    given["stream_options"] = {"include_usage": True} if given.get("stream") else None
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        message, param = explain(error.errors())
        raise ApiError(400, message, param=param) from None


def text_of(parts: str | Sequence[Mapping[str, Any]], kinds: Sequence[str], where: str) -> str:
    """The text of a message's parts. Raises ApiError for a part of another kind than these."""
    with refused(where):
        return text_of_parts(parts, kinds, where)


class ChatReader:
    """Reads the responses of one generation. reason: the engine's finish reason, "" before the end; stop_string: the
    stop string that ended the text, if the request has some and the model says it."""

    def __init__(self, model: Model, tools: ToolUse) -> None:
        self._parser = tools.make_parser() if tools.make_parser is not None else None
        self._has_reasoning = tools.has_reasoning
        self.usage = Usage(model)
        self.reason = self.stop_string = ""

    def read(self, response: Response) -> list[Event]:
        self.usage.add(response)
        self.reason = response.text("finish_reason")
        if self.reason and STOP_REASON in response.positions:
            self.stop_string = response.text(STOP_REASON)
        text = response.text("text_output")
        if self._parser is None:
            return [Content(text)] if text else []
        events = self._parser.feed(text)
        if self._has_reasoning:
            self.usage.add_reasoning(response, 0, events)
        return [*events, *(self._parser.finish() if self.reason else [])]
