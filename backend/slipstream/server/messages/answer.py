"""The answer of the Messages API: blocks that grow event by event, streamed or taken as a whole."""

from __future__ import annotations

from typing import Any

from slipstream.server.chat_turn import ChatReader
from slipstream.server.gateway import finish_reason, timed_out
from slipstream.server.generation import Response
from slipstream.server.messages.schemas import MessagesRequest
from slipstream.server.sse import StreamForm, named_event
from slipstream.server.tools.arguments import read_arguments
from slipstream.server.tools.json_call import CallArguments, CallStart, Event, Reasoning
from slipstream.server.tools.select import ToolUse

_STOP_REASONS = {"length": "max_tokens", "content_filter": "refusal", "stop": "end_turn"}
_THINKING = {"type": "thinking", "thinking": "", "signature": ""}  # nobody signs it: requests may leave it out
FORM = StreamForm(b"", named_event)


class MessageWriter:
    """A Writer (sse.py) of one answer; `body` is the answer so far."""

    def __init__(self, request: MessagesRequest, reader: ChatReader, tools: ToolUse) -> None:
        self._reader, self._tools, self._stops = reader, tools, request.stop_sequences or []
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the open block; added one by one each would copy all before it
        self._is_open = False
        self.body: dict[str, Any] = {"id": f"msg_{request.request_id}", "type": "message", "role": "assistant"}
        self.body |= {"model": request.model, "content": [], "stop_reason": None, "stop_sequence": None}
        self.body["usage"] = {"input_tokens": 0, "output_tokens": 0}
        self._has_begun = False

    def start(self) -> bytes:
        return b""

    def response(self, response: Response) -> bytes:
        found = self._reader.read(response)  # first: the beginning says how long the prompt is
        data = b"".join(self._take(each) for each in found)
        if not self._has_begun:
            self._has_begun = True
            begun = {**self.body, "usage": {**_usage(self._reader), "output_tokens": 0}}
            data = named_event({"type": "message_start", "message": begun}) + data
        return data + self._finish() if self._reader.reason else data

    def end(self) -> bytes:
        return b""

    async def last(self) -> bytes:
        return b""

    # ---- parts

    def _take(self, found: Event) -> bytes:
        if isinstance(found, CallArguments):
            self._texts.append(found.text)
            return self._delta({"type": "input_json_delta", "partial_json": found.text})
        if isinstance(found, CallStart):
            block = {"type": "tool_use", "id": found.call_id or self._tools.make_id(), "name": found.name, "input": {}}
            return self._close() + self._open(block)
        if isinstance(found, Reasoning):
            begun = b"" if self._has_open("thinking") else self._close() + self._open(dict(_THINKING))
            self._texts.append(found.text)
            return begun + self._delta({"type": "thinking_delta", "thinking": found.text})
        is_text = self._has_open("text")
        data = b"" if is_text else self._close() + self._open({"type": "text", "text": ""})
        self._texts.append(found.text)
        return data + self._delta({"type": "text_delta", "text": found.text})

    def _has_open(self, kind: str) -> bool:
        return self._is_open and self._blocks[-1]["type"] == kind

    def _open(self, block: dict[str, Any]) -> bytes:
        self._is_open, self._texts = True, []
        self._blocks.append(block)
        return self._event("content_block_start", content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._event("content_block_delta", delta=delta)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return named_event({"type": kind, "index": len(self._blocks) - 1, **fields})

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        block, text = self._blocks[-1], "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
        return self._event("content_block_stop")

    def _finish(self) -> bytes:
        data = self._close()
        reason = _STOP_REASONS[finish_reason(self._reader.reason)]
        is_matched = self._reader.stop_string in self._stops
        if reason == "end_turn" and any(block["type"] == "tool_use" for block in self._blocks):
            reason = "tool_use"
        elif reason == "end_turn" and is_matched:
            reason = "stop_sequence"
        stop = {"stop_reason": reason, "stop_sequence": self._reader.stop_string if is_matched else None}
        stop |= timed_out(self._reader.reason)
        self.body |= {"content": self._blocks, **stop, "usage": _usage(self._reader)}
        data += named_event({"type": "message_delta", "delta": stop, "usage": _usage(self._reader)})
        return data + named_event({"type": "message_stop"})


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call; empty for one that was cut off."""
    try:
        found = read_arguments(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _usage(reader: ChatReader) -> dict[str, int]:
    """Cached tokens are counted beside the input's."""
    counts = reader.usage.to_json() or {"prompt_tokens": 0, "completion_tokens": 0}
    cached = counts.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    told = {"input_tokens": counts["prompt_tokens"] - cached, "output_tokens": counts["completion_tokens"]}
    return {**told, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
