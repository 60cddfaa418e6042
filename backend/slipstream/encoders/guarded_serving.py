"""`guarded`, a decoupled model of Triton's Python backend: many requests at once in one process.

Two threads: Triton's, which hands requests over and returns at once, and the event loop's, which owns all the rest: the
pipelines, the calls of other models, the responses. Server 2.51 tells nobody of a client that left: it is asked.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from slipstream.core.answer_faults import CODES, AnswerError, with_code
from slipstream.core.errors import CapacityError, EngineError, RequestError, SlipstreamError, internal_error
from slipstream.encoders.guard_settings import GuardSettings, read_settings
from slipstream.encoders.guarded import Answer, Pipeline
from slipstream.encoders.guarded_parts import GuardedParts, Models
from slipstream.encoders.guarded_request import GuardedRequest, read_request
from slipstream.encoders.parameters import Parameters
from slipstream.encoders.serving import refuse
from slipstream.encoders.text_tensors import strings

_log = logging.getLogger(__name__)
_POLL_S = 0.05  # how late a cancellation may be seen; each question is a message to the server (40 us)
_END_S = 10.0  # of what still runs when the model is unloaded


class GuardedModel:
    """What Triton calls, in its own thread."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._settings = read_settings(Parameters.of_model(json.loads(args["model_config"])))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="guarded")
        self._thread.start()
        self._guard = asyncio.run_coroutine_threadsafe(_opened(self._settings), self._loop).result()

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                asked = read_request(request, self._settings.max_prompt_chars)
            except RequestError as error:
                sender.send(refuse(error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            self._loop.call_soon_threadsafe(self._guard.start, asked, sender)

    def finalize(self) -> None:
        asyncio.run_coroutine_threadsafe(self._guard.close(), self._loop).result(_END_S + 5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _opened(settings: GuardSettings) -> Guard:
    return Guard(settings)


class Guard:
    """All requests of a process, a task each. Event loop thread."""

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._models = Models(settings)
        self._clients: dict[asyncio.Task[Any], _Client] = {}  # until their final flag is sent
        self._watcher = asyncio.ensure_future(self._watch())

    def start(self, request: GuardedRequest, sender: Any) -> None:
        task = asyncio.ensure_future(self._serve(request, sender))
        self._clients[task] = _Client(sender)
        task.add_done_callback(self._end)  # not the task's own `finally`: a task cancelled before it began has none

    async def close(self) -> None:
        self._watcher.cancel()
        for task, client in self._clients.items():
            if not client.has_left:
                task.cancel()
        if self._clients:
            await asyncio.wait(list(self._clients), timeout=_END_S)
        await self._models.calls.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            for task, client in list(self._clients.items()):
                if not client.has_left and client.leaves():  # cancelled once: its way out is not to be disturbed
                    task.cancel()

    async def _serve(self, request: GuardedRequest, sender: Any) -> Any:
        """One request; the error that ends it, or None."""
        try:
            await self._models.calls.connect()
            parts = GuardedParts(self._models, request, lambda answer: sender.send(_response(answer)))
            settings = self._settings
            await Pipeline(parts, settings.window, settings.on_failure, request.is_streaming).run(request.prompt)
        except AnswerError as failure:
            return _error(str(failure), failure.fault)
        except Exception as failure:  # the top of the request
            told = internal_error(_log, "a guarded request failed", failure)
            return _error(str(told), EngineError)
        return None

    def _end(self, task: asyncio.Task[Any]) -> None:
        """Every way out comes here: without the final flag the model could never be unloaded."""
        client, error = self._clients.pop(task), None
        if client.has_left:
            pass  # nothing to one who left: server 2.51 minds an error in that moment
        elif task.cancelled():
            error = _error("guarded was unloaded", CapacityError)
        elif task.exception() is None:
            error = task.result()
        response = () if error is None else (pb_utils.InferenceResponse(error=error),)
        client.sender.send(*response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


@dataclass
class _Client:
    sender: Any
    has_left: bool = False
    is_unheard: bool = False  # asking about it failed once, and was logged

    def leaves(self) -> bool:
        """Whether it has left, as far as the server tells."""
        try:
            self.has_left = bool(self.sender.is_cancelled())
        except Exception:  # whatever it is, the other clients are asked all the same
            if not self.is_unheard:
                _log.exception("whether a client left cannot be told; it is asked again")
            self.is_unheard = True
        return self.has_left


def _error(text: str, fault: type[SlipstreamError]) -> Any:
    return pb_utils.TritonError(with_code(text, fault), getattr(pb_utils.TritonError, CODES[fault]))


def _response(answer: Answer) -> Any:
    tensors = {
        "text_output": strings([[answer.text]])[0],
        "finish_reason": strings([[answer.finish_reason]])[0],
        "blocked": np.array([bool(answer.block_reason)]),
        "block_reason": strings([[answer.block_reason]])[0],
        "block_categories": np.array([name.encode() for name in answer.unsafe.categories], dtype=np.object_),
        "block_score": np.array([answer.unsafe.score], np.float32),
        "safety_checked": np.array([answer.is_checked]),
        "quality_score": np.array([answer.quality_score], np.float32),
        "quality_checks": strings([[answer.quality_checks]])[0],
        "num_input_tokens": np.array([answer.num_input_tokens], np.uint32),
        "num_output_tokens": np.array([answer.num_output_tokens], np.uint32),
    }
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in tensors.items()])
