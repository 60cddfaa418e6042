"""Serves a `tokenize` or `detokenize` model: answers each request on arrival, large prompts on the pool's thread.

`detokenize` requests stay in order, on one thread: through an ensemble the pieces of a stream arrive one after another.
No torch in this process.
"""

from __future__ import annotations

import time

from slipstream.core.config import EngineConfig
from slipstream.core.errors import CapacityError
from slipstream.core.request import FinishReason
from slipstream.engine.request_pool import MAX_INLINE_BYTES, RequestPool
from slipstream.engine.socket import EngineLink, error_answer, read_request, too_large
from slipstream.engine.tokenize_tasks import make_task
from slipstream.protocol import wire
from slipstream.protocol.contract import OUTPUTS


class TokenizeServer:
    """Loads the tokenizer (ConfigError when it cannot); `serve` returns the exit status of the process."""

    def __init__(self, link: EngineLink, config: EngineConfig) -> None:
        self._link = link
        self._outputs = OUTPUTS[config.task]
        self._task = make_task(config)
        self._has_order = config.task == "detokenize"
        self._pool = RequestPool(self, config.scheduler.max_waiting_requests, config.serving.max_tokenizing_bytes)

    def serve(self) -> int:
        """Answer until the backend closes the socket or drains; all earlier requests are answered by then."""
        self._link.send(wire.encode_ready(self._outputs, ()))
        for kind, payload in self._link.frames():
            if kind is wire.FrameType.REQUEST:
                request = read_request(payload, self._link.send)
                if request is not None:
                    self._take(request, is_large=len(payload) > MAX_INLINE_BYTES)
            elif kind is wire.FrameType.CANCEL:
                self._pool.cancel(wire.decode_cancel(payload))
            elif kind is wire.FrameType.DRAIN:
                self._pool.wait_empty(wire.decode_drain(payload) / 1e3)
                for handle in self._pool.close():
                    self._refuse(handle, CapacityError("the model was unloaded before the request ended"))
                self._link.send(wire.encode_drained())
                return 0
        return 0

    def _take(self, request: wire.Request, is_large: bool) -> None:
        if self._has_order or not is_large:
            self._link.send(self.parse(request))
            return
        try:
            self._task.check_size(request)
            waits_s = request.timeout_us / 1e6
            self._pool.put(request, time.monotonic() + waits_s if waits_s else None)
        except Exception as error:
            self._refuse(request.handle, error)

    def _refuse(self, handle: int, error: Exception) -> None:
        self._link.send(error_answer(handle, error))

    # ------------------------------------------------------------ pool's thread

    def deliver(self, handle: int, parsed: bytes) -> None:
        self._link.send(parsed)

    def end(self, handle: int, known: None, reason: FinishReason) -> None:
        """Answer with an error, because the outputs of this task have no finish reason."""
        if reason is FinishReason.CANCELLED:
            text = "cancelled while it waited to be tokenised"
            self._link.send(wire.encode_responses([wire.error_response(handle, wire.ErrorCode.CANCELLED, text)]))
        else:
            self._refuse(handle, CapacityError("timed out while it waited to be tokenised"))

    def cancelled(self, handle: int) -> None:
        """Nothing to do: the request is answered."""

    def parse(self, request: wire.Request) -> bytes:
        try:
            answer = self._task.answer(request)
            if len(answer) > wire.MAX_RESPONSE_BYTES:
                answer = too_large(request.handle, answer)
            return wire.encode_responses([answer])
        except Exception as error:
            return error_answer(request.handle, error)
