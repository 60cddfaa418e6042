"""The answer of the Responses API: items that grow event by event, streamed or taken as a whole."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

from slipstream.server.catalog import Model
from slipstream.server.chat_turn import ChatReader
from slipstream.server.gateway import finish_reason, timed_out
from slipstream.server.generation import Response
from slipstream.server.responses.schemas import ResponsesRequest
from slipstream.server.sse import StreamForm, named_event
from slipstream.server.tools.arguments import read_arguments
from slipstream.server.tools.json_call import CallArguments, CallStart, Content, Event, Reasoning
from slipstream.server.tools.select import ToolUse

# An id is random, as it gives access to the kept answer; the request's id would not do: a client may choose it.
_ID_BYTES = 16
_REPEATED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "top_p", "user")
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def _failed(body: dict[str, Any]) -> bytes:
    error = body["error"]
    told = {"code": error["code"] or error["type"], "message": error["message"], "param": error["param"]}
    return named_event({"type": "error", "sequence_number": 0, **told, "error": error})


FORM = StreamForm(b"", _failed)


class ResponseWriter:
    """A Writer (sse.py) of one answer; `body` is the answer so far. keep: called with the whole body, on a thread."""

    def __init__(
        self, request: ResponsesRequest, reader: ChatReader, tools: ToolUse, keep: Callable[[dict[str, Any]], None]
    ) -> None:
        self._reader, self._tools, self._keep = reader, tools, keep
        self._number = 0
        self._id = request.request_id or ""
        self._items: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the open item; added one by one each would copy all before it
        self.body = _head(request)

    def start(self) -> bytes:
        return self._event("response.created", response=self.body) + self._event(
            "response.in_progress", response=self.body
        )

    def response(self, response: Response) -> bytes:
        data = b"".join(self._take(found) for found in self._reader.read(response))
        return data + self._finish() if self._reader.reason else data

    def end(self) -> bytes:
        return b""

    async def last(self) -> bytes:
        """The event of the end, which says whether the answer is kept."""
        if not self._reader.reason:
            return b""
        await asyncio.to_thread(self._keep, self.body)
        return self._event(f"response.{self.body['status']}", response=self.body)

    # ---- parts

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event({"type": kind, "sequence_number": self._number - 1, **fields})

    def _take(self, found: Event) -> bytes:
        if isinstance(found, CallArguments):
            item = self._items[-1]
            self._texts.append(found.text)
            return self._event("response.function_call_arguments.delta", **self._place(item), delta=found.text)
        if isinstance(found, CallStart):
            return self._close() + self._open_call(found)
        if isinstance(found, Reasoning):
            return (b"" if self._has_open("reasoning") else self._close() + self._open_reasoning()) + self._think(found)
        return (b"" if self._has_open("message") else self._close() + self._open_message()) + self._add_text(found)

    def _has_open(self, kind: str) -> bool:
        return bool(self._items) and self._items[-1]["type"] == kind and self._items[-1]["status"] == "in_progress"

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self._items) - 1}

    def _open_message(self) -> bytes:
        item = {"type": "message", "id": f"msg_{self._id}_{len(self._items)}", "role": "assistant"}
        self._items.append({**item, "status": "in_progress", "content": []})
        data = self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items[-1]["content"].append(part)
        place = {**self._place(self._items[-1]), "content_index": 0}
        return data + self._event("response.content_part.added", **place, part=part)

    def _open_reasoning(self) -> bytes:
        item = {"type": "reasoning", "id": f"rs_{self._id}_{len(self._items)}", "summary": [], "status": "in_progress"}
        self._items.append({**item, "content": [{"type": "reasoning_text", "text": ""}]})
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])

    def _think(self, found: Reasoning) -> bytes:
        item = self._items[-1]
        self._texts.append(found.text)
        place = {**self._place(item), "content_index": 0}
        return self._event("response.reasoning_text.delta", **place, delta=found.text)

    def _add_text(self, found: Content) -> bytes:
        item = self._items[-1]
        self._texts.append(found.text)
        place = {**self._place(item), "content_index": 0}
        return self._event("response.output_text.delta", **place, delta=found.text, logprobs=[])

    def _open_call(self, found: CallStart) -> bytes:
        item = {"type": "function_call", "id": f"fc_{self._id}_{len(self._items)}", "status": "in_progress"}
        call_id = found.call_id or self._tools.make_id()
        self._items.append({**item, "call_id": call_id, "name": found.name, "arguments": ""})
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])

    def _close(self, status: str = "completed") -> bytes:
        """End the open item, if there is one."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return b""
        item, text, self._texts = self._items[-1], "".join(self._texts), []
        item["status"] = status
        place, data = self._place(item), b""
        if item["type"] == "message":
            part, place = item["content"][0], {**place, "content_index": 0}
            part["text"] = text
            data = self._event("response.output_text.done", **place, text=text, logprobs=[])
            data += self._event("response.content_part.done", **place, part=part)
        elif item["type"] == "reasoning":
            item["content"][0]["text"] = text
            data = self._event("response.reasoning_text.done", **place, content_index=0, text=text)
        else:
            item["arguments"] = text
            data = self._event("response.function_call_arguments.done", **place, arguments=text)
        return data + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _finish(self) -> bytes:
        why = _INCOMPLETE.get(finish_reason(self._reader.reason))
        status = "incomplete" if why else "completed"
        data = self._close(status)
        self.body |= {"status": status, "output": self._items, "usage": _usage(self._reader)}
        self.body["incomplete_details"] = {"reason": why, **timed_out(self._reader.reason)} if why else None
        self.body["completed_at"] = None if why else int(time.time())
        return data


def count_reasoning(body: dict[str, Any], model: Model) -> None:
    """Set the tokens of the reasoning in the usage of a whole answer: of its text, as the engine counts all in one. Not
    on the event loop."""
    texts = [item["content"][0]["text"] for item in body["output"] if item["type"] == "reasoning"]
    if body["usage"] is not None:
        count = model.tokenizer.count(texts) if texts and model.tokenizer.is_there else 0
        count = min(count, body["usage"]["output_tokens"])  # another cut of the text may have more
        body["usage"]["output_tokens_details"]["reasoning_tokens"] = count


def answer_message(body: dict[str, Any]) -> dict[str, Any]:
    """The answer as a chat's message, for a request that continues it."""
    text = "".join(item["content"][0]["text"] for item in body["output"] if item["type"] == "message")
    calls = [
        {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}}
        for item in body["output"]
        if item["type"] == "function_call" and _is_json(item["arguments"])
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def _is_json(text: str) -> bool:
    """A call that was cut off is none."""
    try:
        read_arguments(text)
    except ValueError:
        return False
    return True


def _head(request: ResponsesRequest) -> dict[str, Any]:
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or []]
    return {
        "id": f"resp_{secrets.token_hex(_ID_BYTES)}",
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "status": "in_progress",
        "output": [],
        "error": None,
        "incomplete_details": None,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "tool_choice": request.shown("tool_choice") or "auto",
        "tools": [{"parameters": None, "strict": None, **tool} for tool in tools],
        "text": request.shown("text") or {"format": {"type": "text"}},
        "reasoning": request.shown("reasoning") or {"effort": None, "summary": None},
        "truncation": request.truncation or "disabled",
        "store": request.store is not False,
        "usage": None,
        **{name: request.shown(name) for name in _REPEATED},
    }


def _usage(reader: ChatReader) -> dict[str, Any] | None:
    counts = reader.usage.to_json()
    if counts is None:
        return None
    cached = counts.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    thought = counts.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": counts["total_tokens"],
    }
