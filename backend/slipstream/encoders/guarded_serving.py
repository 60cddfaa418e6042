"""`guarded`, a decoupled BLS model of Triton's Python backend: the pipeline's parts as calls of other models.

A process, one instance of the model, runs one request at a time: several BLS requests in one process crash the stub of
server 2.51, or hang it, once in a hundred (docs/LOG.md). A second thread takes the LLM's responses, so that the first
sees a cancellation, and stops the LLM, also while no token comes (BLS calls of this server cannot be cancelled). It
takes the next one when the first has dealt with the last: reading beside a call of an encoder crashes the stub as well.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import triton_python_backend_utils as pb_utils

from slipstream.core.errors import ConfigError, RequestError
from slipstream.core.setting_values import read_int, shown
from slipstream.encoders.guarded import (
    CLOSED,
    OPEN,
    Answer,
    ClientGone,
    EncoderFailure,
    LlmFailure,
    Piece,
    Pipeline,
    Unsafe,
)
from slipstream.encoders.parameters import Parameters
from slipstream.encoders.serving import read_texts, refuse, strings
from slipstream.encoders.timed_calls import CallAbandoned, CallTimeout, TimedCalls
from slipstream.encoders.window import WindowSettings

_log = logging.getLogger(__name__)
_FORWARDED = ("sampling_parameters", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop_words")
_OF_LLM = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")
_ASKED_FOR = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "exclude_input_in_output")
_SEQUENCE_COUNTS = ("n", "best_of", "num_return_sequences", "sampling_param_best_of")
_POLL_S = 0.05  # how late a cancellation may be seen
# An LLM that is well answers a stop in milliseconds. One that is not may never: its call is left behind then, and BLS
# calls beside it may crash the stub, which is better than an instance that hangs for ever.
_STOP_S, _STREAM_END_S = 5.0, 30.0
_CHECK_ROWS = 32  # windows of one call of the safety model

Result = TypeVar("Result")


@dataclass(frozen=True)
class GuardSettings:
    llm: str
    safety: str
    quality: str
    on_failure: str
    encoder_timeout_s: float
    llm_timeout_s: float
    window: WindowSettings
    max_prompt_chars: int


def read_settings(parameters: Parameters) -> GuardSettings:
    """Raises ConfigError."""
    hold_back = parameters.integer("hold_back_chars", 80, 0, 100_000)
    stride = parameters.integer("check_every_chars", 40, 1, 100_000)
    size = parameters.integer("window_chars", 240, 1, 1_000_000)
    if size < hold_back + stride:
        raise ConfigError(
            "window_chars", size, f"accepted: at least hold_back_chars + check_every_chars = {hold_back + stride}"
        )
    settings = GuardSettings(
        llm=parameters.text("llm", "llm"),
        safety=parameters.text("safety", "safety"),
        quality=parameters.text("quality", "quality"),
        on_failure=parameters.choice("on_encoder_failure", CLOSED, (OPEN, CLOSED)),
        encoder_timeout_s=parameters.integer("encoder_timeout_ms", 30_000, 1, 3_600_000) / 1e3,
        llm_timeout_s=parameters.integer("llm_timeout_ms", 120_000, 1, 86_400_000) / 1e3,
        window=WindowSettings(size, hold_back, stride),
        max_prompt_chars=parameters.integer("max_prompt_chars", 200_000, 1, 1_000_000),
    )
    parameters.refuse_others()
    return settings


@dataclass(frozen=True)
class Encoders:
    safety: TimedCalls
    quality: TimedCalls


class GuardedModel:
    def initialize(self, args: Mapping[str, str]) -> None:
        self._settings = read_settings(Parameters.of_model(json.loads(args["model_config"])))
        # a thread each: one that hangs holds up only its own calls
        timeout_s = self._settings.encoder_timeout_s
        self._encoders = Encoders(
            TimedCalls(self._settings.safety, timeout_s), TimedCalls(self._settings.quality, timeout_s)
        )

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                guarded = GuardedRequest(request, sender, self._settings, self._encoders)
            except RequestError as error:
                sender.send(refuse(error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            guarded.run()


def _refuse_several(parameters: Mapping[str, Any], sampling: np.ndarray | None) -> None:
    """Raise RequestError for more than one sequence: their tokens come mixed, and nobody would have checked either."""
    text = parameters.get("sampling_parameters") if sampling is None else sampling.reshape(-1)[0]
    given: Any = text
    if isinstance(text, (str, bytes)):  # the LLM takes the settings as a tensor or as a request parameter
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError("sampling_parameters", f"is no JSON ({error}); accepted: a JSON object") from None
    for settings in (parameters, given if isinstance(given, dict) else {}):
        for name in _SEQUENCE_COUNTS:
            value = settings.get(name)
            if value is not None and read_int(name, value) != 1:  # as the LLM reads it: null is as if absent
                raise RequestError(name, f"got {shown(value)}; accepted: 1, because each answer is checked by itself")


class GuardedRequest:
    """One request: the `Parts` of its pipeline, over BLS."""

    def __init__(self, request: Any, sender: Any, settings: GuardSettings, encoders: Encoders) -> None:
        """Raises RequestError."""
        self._sender, self._settings, self._encoders = sender, settings, encoders
        self._id = f"guarded-{uuid.uuid4().hex}"
        prompts = read_texts(request, "text_input")
        if len(prompts) != 1 or not prompts[0]:
            raise RequestError("text_input", "accepted: one text that is not empty")
        self._prompt = prompts[0]
        if len(self._prompt) > settings.max_prompt_chars:
            told = (
                f"has {len(self._prompt)} characters; accepted: at most {settings.max_prompt_chars} (max_prompt_chars)"
            )
            raise RequestError("text_input", told)
        stream = pb_utils.get_input_tensor_by_name(request, "stream")
        self._is_streaming = stream is not None and bool(stream.as_numpy().reshape(-1)[0])
        self._inputs = {"text_input": strings([prompts])[0], "stream": np.array([True])}
        self._inputs.update({name: np.array([True]) for name in _ASKED_FOR})
        for name in _FORWARDED:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is not None:
                self._inputs[name] = tensor.as_numpy().copy()  # the request's memory is gone once execute returned
        self._parameters = json.loads(request.parameters() or "{}")
        _refuse_several(self._parameters, self._inputs.get("sampling_parameters"))
        self._responses: queue.SimpleQueue[Piece | LlmFailure | None] = queue.SimpleQueue()
        self._may_read = threading.Semaphore(0)  # the next response: never beside a call of an encoder
        self._has_ended = True  # no stream of the LLM is open
        self._is_stopped = False
        self._asking: threading.Thread | None = None  # the last call that asks the LLM to stop
        self._looked_at = 0.0
        self._was_cancelled = False

    def run(self) -> None:
        """To the end of the request: every way out sends the final flag."""
        try:
            Pipeline(self, self._settings.window, self._settings.on_failure, self._is_streaming).run(self._prompt)
        except LlmFailure as failure:
            error = pb_utils.TritonError(str(failure), failure.code or pb_utils.TritonError.INTERNAL)
            self._sender.send(pb_utils.InferenceResponse(error=error))
        except Exception as failure:  # the top of the request
            _log.exception("a guarded request failed")
            self.stop()
            self._sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(f"guarded: {failure}")))
        finally:
            self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    # ------------------------------------------------------------ the pipeline's parts

    def check(self, texts: Sequence[str]) -> Unsafe | None:
        return self._in_time(self._encoders.safety, lambda: self._check(texts))

    def _check(self, texts: Sequence[str]) -> Unsafe | None:
        worst: Unsafe | None = None
        for start in range(0, len(texts), _CHECK_ROWS):
            rows = strings([[text] for text in texts[start : start + _CHECK_ROWS]])
            found = _call(self._settings.safety, {"text": rows}, ("flagged", "categories", "scores"))
            for row in np.flatnonzero(found["flagged"].reshape(-1)):
                names = tuple(name.decode() for name in found["categories"][row] if name)
                unsafe = Unsafe(names, float(found["scores"][row].max()))
                worst = unsafe if worst is None or unsafe.score > worst.score else worst
        return worst

    def judge(self, answer: str) -> tuple[float, str]:
        return self._in_time(self._encoders.quality, lambda: self._judge(answer))

    def _judge(self, answer: str) -> tuple[float, str]:
        tensors = {"prompt": strings([[self._prompt]]), "answer": strings([[answer]])}
        found = _call(self._settings.quality, tensors, ("score", "checks"))
        return float(found["score"].reshape(-1)[0]), found["checks"].reshape(-1)[0].decode()

    def _in_time(self, encoder: TimedCalls, work: Callable[[], Result]) -> Result:
        """Raises EncoderFailure, and ClientGone."""
        try:
            return encoder.run(work, self.is_cancelled)
        except CallTimeout as error:
            _log.warning("%s: %s", encoder.name, error)
            raise EncoderFailure(str(error)) from error
        except CallAbandoned as error:
            raise ClientGone from error

    def pieces(self) -> Iterator[Piece]:
        self._has_ended = False
        taker = threading.Thread(target=self._take, daemon=True)
        taker.start()
        heard = time.monotonic()
        while True:
            try:
                response = self._responses.get(timeout=_POLL_S)
            except queue.Empty:
                self._check_silence(time.monotonic() - heard)
                yield Piece("")
                continue
            if response is None:
                self._has_ended = True
                return
            if isinstance(response, LlmFailure):
                self._may_read.release()  # the end
                raise response
            yield response
            self._may_read.release()
            heard = time.monotonic()

    def _check_silence(self, seconds: float) -> None:
        """Raises LlmFailure when it lasts too long: server 2.51's stub loses an answer now and then (docs/LOG.md)."""
        if seconds < self._settings.llm_timeout_s:
            return
        self._has_ended = self._is_stopped = True  # for us: nobody waits for the rest, which is only taken
        self._may_read.release()
        self._ask_to_stop(_STOP_S)
        limit = f"llm_timeout_ms={self._settings.llm_timeout_s * 1e3:.0f}"
        raise LlmFailure(f"{self._settings.llm} was silent for longer than {limit}", pb_utils.TritonError.UNAVAILABLE)

    def stop(self) -> None:
        """End the LLM's request by its id, and wait for it, 30 s at most: asked again until its stream has ended."""
        if self._has_ended or self._is_stopped:
            return
        self._is_stopped = True
        self._may_read.release()
        deadline = time.monotonic() + _STREAM_END_S
        while (left := deadline - time.monotonic()) > 0:
            self._ask_to_stop(min(_STOP_S, left))
            with_end = time.monotonic() + 0.5
            while time.monotonic() < with_end:
                try:
                    if self._responses.get(timeout=_POLL_S) is None:
                        return
                except queue.Empty:
                    continue

    def is_cancelled(self) -> bool:
        """Asked at most every 50 ms: each question is a message to the server (40 us)."""
        now = time.monotonic()
        if not self._was_cancelled and now - self._looked_at > _POLL_S:
            self._looked_at = now
            self._was_cancelled = self._sender.is_cancelled()
        return self._was_cancelled

    def send(self, answer: Answer) -> None:
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
        self._sender.send(pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in tensors.items()]))

    # ------------------------------------------------------------ the LLM

    def _take(self) -> None:
        """The second thread: the LLM's responses into the queue, None at the end."""
        try:
            call = pb_utils.InferenceRequest(
                model_name=self._settings.llm,
                request_id=self._id,
                requested_output_names=list(_OF_LLM),
                inputs=[pb_utils.Tensor(name, value) for name, value in self._inputs.items()],
                parameters=self._parameters,
            )
            for response in call.exec(decoupled=True):
                # read here: a response that another thread reads while the next one comes can hang the stub
                self._responses.put(_piece(response))
                if not self._is_stopped:
                    self._may_read.acquire()
        except Exception as error:  # the top of the thread; the model may be gone
            self._responses.put(LlmFailure(str(error)))
        self._responses.put(None)

    def _ask_to_stop(self, seconds: float) -> None:
        """Wait no longer for the answer. While there is none, no second call is made beside the first."""
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._stop_llm, daemon=True, name=f"stop of {self._id}")
            self._asking.start()
        self._asking.join(seconds)
        if self._asking.is_alive():
            _log.warning("%s: no answer to a stop in %.1f s", self._settings.llm, seconds)

    def _stop_llm(self) -> None:
        """A thread of its own, because a BLS call cannot be ended."""
        try:
            tensors = [pb_utils.Tensor("stop", np.array([True]))]
            call = pb_utils.InferenceRequest(
                model_name=self._settings.llm, request_id=self._id, requested_output_names=[], inputs=tensors
            )
            for _ in call.exec(decoupled=True):
                pass
        except Exception as error:  # the top of the thread; the model may be gone
            _log.warning("%s: a stop failed: %s", self._settings.llm, error)


def _piece(response: Any) -> Piece | LlmFailure:
    if response.has_error():
        return LlmFailure(response.error().message(), response.error().code())
    outputs = {tensor.name(): tensor.as_numpy().reshape(-1) for tensor in response.output_tensors()}
    text = b"".join(outputs.get("text_output", np.array([], dtype=np.object_))).decode("utf-8", "replace")
    reasons = [reason.decode() for reason in outputs.get("finish_reason", []) if reason]
    num_input, num_output = (int(outputs.get(name, np.array([0])).sum()) for name in _OF_LLM[2:])
    return Piece(text, reasons[-1] if reasons else "", num_input, num_output)


def _call(model: str, tensors: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Another model's answer.  Raises EncoderFailure when there is none."""
    call = pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=list(outputs),
        inputs=[pb_utils.Tensor(name, value) for name, value in tensors.items()],
    )
    try:
        response = call.exec()
    except pb_utils.TritonModelException as error:  # not loaded
        _log.warning("%s: %s", model, error)
        raise EncoderFailure(str(error)) from error
    if response.has_error():
        _log.warning("%s: %s", model, response.error().message())
        raise EncoderFailure(response.error().message())
    return {name: pb_utils.get_output_tensor_by_name(response, name).as_numpy() for name in outputs}
