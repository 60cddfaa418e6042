"""State shared by all requests of a worker, and the two ways to run one: whole, or as a stream of events.

Event loop thread. A client that leaves is noticed in both, also before the first token: its stream is cancelled, and
Triton cancels the request in the engine.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from slipstream.server.catalog import Catalog, Model
from slipstream.server.errors import ApiError
from slipstream.server.generation import Generation, Response
from slipstream.server.metrics import Metrics
from slipstream.server.model_tokenizer import TokenizerThreads
from slipstream.server.options import GatewayOptions
from slipstream.server.pace import Pace
from slipstream.server.request_log import CLIENT_LEFT
from slipstream.server.responses.store import ResponseStore
from slipstream.server.sse import OPENAI_FORM, EventStream, StreamForm, Writer
from slipstream.server.tenancy import Meter
from slipstream.server.triton import GenerateStream, TritonLink, together
from slipstream.server.usage import count_outputs

T = TypeVar("T")
_VERDICT = ("blocked", "block_reason", "block_categories")
# Bodies up to here are planned on the event loop's thread, in at most a few milliseconds (17 us a message): to hand
# each to a thread would cost a busy gateway more.
MAX_PLANNED_AT_ONCE_BYTES = 16 << 10
MAX_ECHOED_CHARS = 16 << 20  # four bodies of the largest size: n of one would make half a gigabyte
CLIENT_GONE = 499  # nginx's status; appears in metrics only


class Gateway:
    """Made on the event loop that serves."""

    def __init__(self, options: GatewayOptions, metrics: Metrics, store: ResponseStore) -> None:
        self.options, self.metrics, self.store = options, metrics, store
        self.link = TritonLink(options.triton_url)
        self.catalog = Catalog(options, self.link)
        self.pace = Pace(options.max_events_per_s)
        self.tokenizing = TokenizerThreads()
        # One thread: a second would take the interpreter from the event loop as often again.
        self._planning = ThreadPoolExecutor(1, "plan")

    async def plan(self, http: HttpRequest, make: Callable[[], T], num_earlier: int = 0) -> T:
        """What `make` reads and renders of a request, on a thread unless it is small: templates take up to a second.

        num_earlier: messages before the request's own, of a kept answer.
        """
        if http.state.body.num_bytes <= MAX_PLANNED_AT_ONCE_BYTES and not num_earlier:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._planning, make)

    async def close(self) -> None:
        self.tokenizing.close()
        self._planning.shutdown(wait=False, cancel_futures=True)
        await self.link.close()

    async def run(self, http: HttpRequest, generations: Sequence[Generation]) -> list[Response]:
        """The one response of each request. Raises ApiError."""
        streams = self._generate(http, generations)
        async with self._attended(http, streams):
            responses = await together([_whole(stream) for stream in streams])
        for response in responses:
            Meter(http.state.lease, http.state.record).add(response)
        return responses

    async def stream(
        self,
        http: HttpRequest,
        generations: Sequence[Generation],
        writers: Sequence[Writer],
        last: Callable[[], Awaitable[bytes]],
        form: StreamForm = OPENAI_FORM,
    ) -> EventStream:
        """A streamed answer. Waits for the first responses, so that errors of a request set the HTTP status."""
        interval = max(self.pace.enter() for _ in generations)
        try:  # a failure from here on, also while the requests are written, must leave the pace again
            for generation in generations:
                interval = max(interval, generation.sampling.get("stream_interval", 1))
                generation.sampling["stream_interval"] = interval
            streams = self._generate(http, generations)
            async with self._attended(http, streams, keep=True):
                first = await together([_first(stream) for stream in streams])
        except BaseException:
            for _ in generations:
                self.pace.leave()
            raise
        meters = [Meter(http.state.lease, http.state.record) for _ in streams]
        return EventStream(list(zip(streams, first)), writers, last, form, self.pace, interval, meters)

    def _generate(self, http: HttpRequest, generations: Sequence[Generation]) -> list[GenerateStream]:
        """The engine knows each by the id that the client gets in a header."""
        record = http.state.record
        for index, generation in enumerate(generations):
            generation.traceparent = record.trace.header if record.trace is not None else ""
            generation.request_id = record.request_id if len(generations) == 1 else f"{record.request_id}-{index}"
        record.is_streamed = generations[0].stream
        return self.link.generate(generations)

    @asynccontextmanager
    async def _attended(
        self, http: HttpRequest, streams: Sequence[GenerateStream], keep: bool = False
    ) -> AsyncIterator[None]:
        """Cancel the streams when the client leaves, and at the end unless `keep` and no error."""

        async def watch() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass
            for stream in streams:
                stream.cancel()

        watcher = asyncio.create_task(watch())
        is_well = False
        try:
            yield
            is_well = True
        except asyncio.CancelledError:
            if not streams[0].is_cancelled:
                raise  # the server is stopping
            self.pace.num_disconnects += 1
            http.state.lease.abandon(is_streamed=keep)
            http.state.record.end = CLIENT_LEFT
            raise ApiError(CLIENT_GONE, "the client has gone") from None
        finally:
            watcher.cancel()
            if not (is_well and keep):
                for stream in streams:
                    stream.cancel()


async def _first(stream: GenerateStream) -> Response | None:
    await stream.start()
    return await stream.read()


async def _whole(stream: GenerateStream) -> Response:
    response = await _first(stream)
    if response is None:
        raise ApiError(500, "the model sent no response", code="internal_error")
    while await stream.read() is not None:
        pass
    return response


def new_head(kind: str, prefix: str, request_id: str, model: Model) -> dict[str, Any]:
    """The leading fields of an answer and its chunks."""
    return {"id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time()), "model": model.name}


def outputs_for(model: Model, *, stream: bool, n: int, usage: bool, logprobs: bool) -> tuple[str, ...]:
    """The outputs that the answer needs, and no more: each costs Triton and the gateway microseconds per token.

    Raises ApiError if the client requests an output that the model does not declare.
    """
    names = ["text_output", "finish_reason"]
    if usage:
        names += count_outputs(model)
    if logprobs:
        require_output(model, "logprobs", "logprobs", "none")
        names.append("logprobs")
    if "safety" in model.outputs:
        names.append("safety")
    elif "blocked" in model.outputs:
        names += [name for name in _VERDICT if name in model.outputs]
    if n > 1:
        require_output(model, "sequence_index", "n", "1")
        names += ["sequence_index"] if stream else []
    return tuple(names)


def require_output(model: Model, output: str, param: str, accepted: str) -> None:
    """Raises ApiError for a setting that needs an output which the model does not declare."""
    if output not in model.outputs:
        message = f"{param}: the model {model.name!r} has no output {output}, accepted: {accepted}"
        raise ApiError(400, message, param=param)


def finish_reason(reason: str) -> str:
    """The finish reason in OpenAI's terms, which have none for a time-out: it is "length", and see `timed_out`."""
    if reason in ("timeout", "length"):
        return "length"
    return "content_filter" if reason in ("content_filter", "blocked") else "stop"


def timed_out(reason: str) -> dict[str, Any]:
    """A further key beside the finish reason, which alone would say that the limit of tokens ended the answer."""
    return {"timed_out": True} if reason == "timeout" else {}


def safety_of(model: Model, response: Response) -> dict[str, Any]:
    """The verdict of a guarded model, as a further key of the answer; nothing while there is none.

    It says so in an output `safety` (JSON as text), or has an output `blocked`, perhaps with the reason and categories.
    """
    if "safety" in model.outputs:
        text = response.text("safety")
        return {"safety": json.loads(text)} if text else {}
    if "blocked" not in model.outputs or not response.integer("blocked"):
        return {}
    verdict: dict[str, Any] = {"flagged": True}
    if "block_reason" in model.outputs:
        verdict["reason"] = response.text("block_reason")
    if "block_categories" in model.outputs:
        verdict["categories"] = [name for name in response.texts("block_categories") if name]
    return {"safety": verdict}


def check_time_out(text: str, reason: str, timeout_ms: int | None) -> None:
    """Raises ApiError for a request that timed out without any text, by its own limit or the model's."""
    if reason == "timeout" and not text:
        if timeout_ms:
            raise ApiError(408, f"no token was made within timeout_ms={timeout_ms}", code="timeout", param="timeout_ms")
        raise ApiError(503, "the request timed out before it was served", code="timeout", retry_after_s=1)


def check_echo(num_chars: int, n: int) -> None:
    """Raises ApiError for an echo of so many characters or token ids that its n copies are too many."""
    if n * num_chars > MAX_ECHOED_CHARS:
        message = f"echo: would repeat {num_chars} characters or token ids n={n} times"
        raise ApiError(400, f"{message}, accepted: at most {MAX_ECHOED_CHARS} in all", param="echo")
