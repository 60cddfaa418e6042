"""`guarded` outside Triton: what it refuses."""

from __future__ import annotations

import importlib
import json
import sys
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


def guarded_request(serving: Any, sampling: str = "{}", parameters: str = "", **given: str) -> Any:
    inputs = [Tensor("text_input", np.array([b"Hello"], dtype=object))]
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
    with pytest.raises(RequestError, match="n: got"):  # null says nothing: the other source counts
        guarded_request(serving, '{"n": null}', json.dumps({"n": value}))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"n": ' * 100_000, "{", "\x00"])
def test_what_is_no_json_or_nested_too_deeply_is_refused_by_name(load: Callable[[Model], Any], text: str) -> None:
    with pytest.raises(RequestError, match="sampling_parameters: is no JSON"):
        guarded_request(load(no_model), text)
