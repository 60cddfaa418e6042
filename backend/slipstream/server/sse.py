"""Server-sent events: an answer whose events come from a writer, one HTTP chunk for each response of the model.

Event loop thread. The loop below runs once per token and stream; a writer (chat.py, completions.py) makes its bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from json import JSONEncoder
from typing import Any, NamedTuple, Protocol

import orjson
from starlette.responses import Response as HttpResponse
from starlette.types import Receive, Scope, Send

from slipstream.server.backlog import Backlog
from slipstream.server.errors import ApiError, error_body
from slipstream.server.generation import Response
from slipstream.server.pace import Pace
from slipstream.server.request_log import CLIENT_LEFT, RequestRecord
from slipstream.server.tenancy import Meter
from slipstream.server.triton import GRACE_S, GenerateStream

logger = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
# Larger responses become events off the event loop: 4,096 tokens may come at once, with 20 log-probabilities each.
MAX_EVENT_BYTES = 64 << 10


class Written:
    """A part of an answer that is JSON already: a long one is made in pieces."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def _read(part: Any) -> Any:
    return orjson.loads(part.data)


def _fragment(part: Any) -> orjson.Fragment:
    if isinstance(part, Written):
        return orjson.Fragment(part.data)
    raise TypeError


to_json: Callable[[object], str] = JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_read).encode


def to_bytes(body: object) -> bytes:
    """JSON, ten times as fast as json makes it: a million numbers take 40 ms, in which no other thread runs."""
    try:
        return orjson.dumps(body, default=_fragment)
    except TypeError:  # half a surrogate, or a number beyond 64 bits, of the client's own
        return to_json(body).encode("utf-8", "replace")


def json_answer(data: bytes) -> HttpResponse:
    """data: of to_bytes, for a long answer made on a thread."""
    return HttpResponse(data, media_type="application/json")


def event(body: object) -> bytes:
    return b"data: " + to_bytes(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """An event whose name is its type."""
    return f"event: {body['type']}\n".encode() + event(body)


class StreamForm(NamedTuple):
    """How a stream ends: what follows the last event, and the event of an error (errors.py) that ends it early."""

    done: bytes
    failed: Callable[[dict[str, Any]], bytes]


OPENAI_FORM = StreamForm(DONE, lambda body: event(body) + DONE)


class Writer(Protocol):
    """Turns responses of one request into events. Any of them may be empty."""

    def start(self) -> bytes: ...

    def response(self, response: Response) -> bytes: ...

    def end(self) -> bytes: ...


class EventStream(HttpResponse):
    """The answer of a streamed request. streams[i], whose first response was read already, is written by writers[i]."""

    media_type = "text/event-stream"

    def __init__(
        self,
        streams: Sequence[tuple[GenerateStream, Response | None]],
        writers: Sequence[Writer],
        last: Callable[[], Awaitable[bytes]],
        form: StreamForm,
        pace: Pace,
        interval: int,
        meters: Sequence[Meter],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._streams, self._writers, self._last, self._form = streams, writers, last, form
        self._pace, self._interval, self._meters = pace, interval, meters
        self._on_thread = asyncio.Lock()  # writers of one answer share counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = scope["state"]["record"]
        send = backlog = Backlog(send, scope)
        watcher = asyncio.create_task(self._cancel_on_disconnect(receive, record))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._write_all(send)
            await _body(send, await self._last() + self._form.done, more=False)
        except ApiError as error:
            record.fail(error.message)
            await _body(send, self._form.failed(error.body(scope["path"])), more=False)
        except asyncio.CancelledError:
            if not self._streams[0][0].is_cancelled:
                raise  # the server is stopping
        except Exception:
            logger.exception("an answer failed in mid-stream")
            record.fail("the gateway failed")
            failed = self._form.failed(error_body(scope["path"], 500, "the gateway failed", "internal_error"))
            await _body(send, failed, more=False)
        finally:
            watcher.cancel()
            backlog.end()
            self.cancel()
            for _ in self._streams:
                self._pace.leave()

    async def _write_all(self, send: Send) -> None:
        if len(self._streams) == 1:
            return await self._write(*self._streams[0], self._writers[0], self._meters[0], send)
        each = zip(self._streams, self._writers, self._meters)
        tasks = [asyncio.create_task(self._write(*stream, writer, meter, send)) for stream, writer, meter in each]
        try:
            await asyncio.gather(*tasks)
        finally:  # nothing may be sent after the error or the end
            await asyncio.wait(tasks, timeout=GRACE_S)
            self.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(
        self, stream: GenerateStream, response: Response | None, writer: Writer, meter: Meter, send: Send
    ) -> None:
        pace, interval = self._pace, self._interval
        data = writer.start()
        while response is not None:
            data += await self._written(writer, response)
            pace.num_tokens += interval
            meter.add(response)
            if data:
                pace.num_events += 1
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = b""
            response = await stream.read()
        data += writer.end()
        if data:
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _written(self, writer: Writer, response: Response) -> bytes:
        if sum(map(len, response.data)) <= MAX_EVENT_BYTES and not self._on_thread.locked():
            return writer.response(response)
        async with self._on_thread:
            return await asyncio.to_thread(writer.response, response)

    async def _cancel_on_disconnect(self, receive: Receive, record: RequestRecord) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        record.end = CLIENT_LEFT
        self._pace.num_disconnects += 1
        self.cancel()

    def cancel(self) -> None:
        for stream, _ in self._streams:
            stream.cancel()


async def _body(send: Send, data: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


class TextEvents:
    """Events of plain text, the usual case: the JSON around the text is built once, not per token."""

    def __init__(self, before: dict[str, Any], make_choice: Callable[[str], dict[str, Any]]) -> None:
        mark = "\u2400text\u2400"
        head, _, tail = to_json({**before, "choices": [make_choice(mark)]}).partition(to_json(mark))
        self._head, self._tail = b"data: " + head.encode(), tail.encode() + b"\n\n"

    def make(self, text: str) -> bytes:
        return self._head + to_json(text).encode("utf-8", "replace") + self._tail
