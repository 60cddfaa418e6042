"""`guarded` outside Triton: what it refuses, and that an LLM that falls silent never holds its process."""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_python_backend import InferenceRequest, InferenceResponse, Sender, Tensor, fake_utils
from slipstream.core.errors import RequestError

Model = Callable[[InferenceRequest], Iterator[InferenceResponse]]
OF_STUB = ("slipstream.encoders.guarded_serving", "slipstream.encoders.serving")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[Model], Any]:
    """Import guarded_serving over a stub whose BLS calls the given model answers."""

    def loaded(model: Model) -> Any:
        monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_utils(model))
        for name in OF_STUB:
            monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(OF_STUB[0])
        for name in OF_STUB:  # the next test's stub is another one
            del sys.modules[name]
        return module

    return loaded


def no_model(request: InferenceRequest) -> Iterator[InferenceResponse]:
    raise AssertionError("called")


def guarded_request(serving: Any, sampling: str | None = "{}", parameters: str = "", **given: str) -> Any:
    inputs = [Tensor("text_input", np.array([b"Hello"], dtype=object))]
    if sampling is not None:
        inputs.append(Tensor("sampling_parameters", np.array([sampling.encode()], dtype=object)))
    settings = serving.read_settings(serving.Parameters(given))
    return serving.GuardedRequest(InferenceRequest(inputs, text_parameters=parameters), Sender(), settings, None)


@pytest.mark.parametrize("value", [None, 1, 1.0, "1"])
def test_one_sequence_may_be_said_as_the_llm_reads_it(load: Callable[[Model], Any], value: object) -> None:
    serving = load(no_model)
    guarded_request(serving, json.dumps({"n": value, "best_of": value}))
    guarded_request(serving, parameters=json.dumps({"n": 1 if value is None else value}))


@pytest.mark.parametrize("value", [2, 2.0, "2", 0, True, 1.5, [1], "one"])
def test_any_other_number_is_refused_by_name(load: Callable[[Model], Any], value: object) -> None:
    serving = load(no_model)
    for given in ({"sampling": json.dumps({"n": value})}, {"parameters": json.dumps({"n": value})}):
        with pytest.raises(RequestError, match="n: got"):
            guarded_request(serving, **given)
    as_parameter = json.dumps({"sampling_parameters": json.dumps({"n": value})})
    with pytest.raises(RequestError, match="n: got"):  # the LLM takes the settings as a request parameter too
        guarded_request(serving, None, as_parameter)
    with pytest.raises(RequestError, match="n: got"):  # null says nothing: the other source counts
        guarded_request(serving, '{"n": null}', json.dumps({"n": value}))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"n": ' * 100_000, "{", "\x00"])
def test_what_is_no_json_or_nested_too_deeply_is_refused_by_name(load: Callable[[Model], Any], text: str) -> None:
    with pytest.raises(RequestError, match="sampling_parameters: is no JSON"):
        guarded_request(load(no_model), text)


class SilentLlm:
    """Sends nothing until `may_speak`; a stop is answered only if answers_stops, and never ends the stream."""

    def __init__(self, answers_stops: bool) -> None:
        self.may_speak, self._answers_stops = threading.Event(), answers_stops
        self.num_stops = 0

    def __call__(self, request: InferenceRequest) -> Iterator[InferenceResponse]:
        is_stop = request.inputs[0].name() == "stop"
        self.num_stops += is_stop
        if not (is_stop and self._answers_stops):
            self.may_speak.wait()
        for _ in range(0 if is_stop else 3):
            yield InferenceResponse([Tensor("text_output", np.array([b"late"], dtype=object))])


def fall_silent(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request to an LLM that is silent for longer than its 100 ms."""
    monkeypatch.setattr(serving, "_STOP_S", 0.2)
    request = guarded_request(serving, llm_timeout_ms="100")
    with pytest.raises(serving.LlmFailure, match="llm was silent for longer than llm_timeout_ms=100"):
        list(request.pieces())
    request.stop()  # as the pipeline may: there is nothing to wait for


def of_before(threads: set[threading.Thread]) -> bool:
    """Whether the threads begun since have ended."""
    for _ in range(100):
        if set(threading.enumerate()) <= threads:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("answers_stops", [True, False])
def test_a_silent_llm_is_given_up_in_time_and_leaves_no_thread(
    load: Callable[[Model], Any], monkeypatch: pytest.MonkeyPatch, answers_stops: bool
) -> None:
    llm, threads, started = SilentLlm(answers_stops), set(threading.enumerate()), time.monotonic()
    fall_silent(load(llm), monkeypatch)
    assert time.monotonic() - started < 5 and llm.num_stops == 1
    llm.may_speak.set()
    assert of_before(threads), "what came late was not taken"


def test_an_llm_that_answers_no_stop_does_not_hold_the_process(
    load: Callable[[Model], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, threads = SilentLlm(answers_stops=False), set(threading.enumerate())
    serving = load(llm)
    monkeypatch.setattr(serving, "_STREAM_END_S", 0.5)
    request, started = guarded_request(serving), time.monotonic()
    next(request.pieces())
    request.stop()
    assert 0.4 < time.monotonic() - started < 5
    assert llm.num_stops == 1, "never two calls at a time"
    llm.may_speak.set()
    assert of_before(threads)
