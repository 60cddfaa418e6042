"""Requests of the encoder models outside Triton: what one of them may have, and what it costs the others."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_python_backend import InferenceRequest, Tensor, TritonError, fake_utils
from slipstream.core.errors import ConfigError

MODULE = "slipstream.encoders.serving"


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_utils())
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def request_of(*texts: str) -> InferenceRequest:
    return InferenceRequest([Tensor("text", np.array([[text.encode()] for text in texts], np.object_))])


def test_the_texts_of_a_request_are_bounded_together(serving: Any) -> None:
    most = 100
    requests = [request_of("fine"), request_of("x" * (most // 2), "y" * (most // 2), "z"), request_of("fine", "too")]

    def run(is_of_each: bool) -> list[Any]:
        def read(request: Any) -> list[str]:
            return serving.read_texts(request, "text", serving.CharBound(most, is_of_each=is_of_each))

        def write(found: list[int]) -> dict[str, np.ndarray]:
            return {"length": np.array(found)}

        return serving.answer(requests, read, lambda texts: list(map(len, texts)), write)

    first, second, third = run(is_of_each=False)
    assert first.outputs["length"].tolist() == [4] and third.outputs["length"].tolist() == [4, 3]
    assert second.error.number == TritonError.INVALID_ARG
    assert second.error.text == f"text: has {most + 1} characters; accepted: at most {most} (max_chars)"
    assert run(is_of_each=True)[1].outputs["length"].tolist() == [most // 2, most // 2, 1]


def test_those_of_many_requests_are_judged_in_parts(serving: Any) -> None:
    """64 requests of a megabyte would have some 20 GB of tokens at once."""
    most, calls = serving.MAX_ENCODED_CHARS, list[int]()
    requests = [request_of(chr(97 + number) * (most // 4)) for number in range(10)]

    def judge(texts: list[str]) -> list[str]:
        calls.append(sum(map(len, texts)))
        return [text[0] for text in texts]

    def write(found: list[str]) -> dict[str, np.ndarray]:
        return {"letter": np.array(found)}

    bound = serving.CharBound(most)
    answers = serving.answer(requests, lambda request: serving.read_texts(request, "text", bound), judge, write)
    assert [answer.outputs["letter"].tolist() for answer in answers] == [[chr(97 + number)] for number in range(10)]
    assert calls == [most, most, most // 2]


class Judge:
    """Takes no time for any text, and flags none."""

    names = ("violence",)
    embed = judge = lambda self, texts: [object()] * len(texts)


def opened(serving: Any, monkeypatch: pytest.MonkeyPatch, model: str, **parameters: str) -> Any:
    """A loaded model without its encoder, whose answers are all empty."""
    for name in ("open_safety", "open_quality", "open_encoder"):
        monkeypatch.setattr(serving, name, lambda *_: Judge())
    loaded = getattr(serving, model)()
    for name in ("_write", "_judged", "_embed"):
        monkeypatch.setattr(type(loaded), name, staticmethod(lambda rows: {}), raising=False)
    entries = {name: {"string_value": value} for name, value in parameters.items()}
    loaded.initialize({"model_config": json.dumps({"parameters": entries}), "model_repository": "."})
    return loaded


@pytest.mark.parametrize(
    ("model", "name", "most"),
    [("SafetyModel", "text", 32_000), ("QualityModel", "answer", 1_000_000), ("EmbeddingModel", "text", 1_000_000)],
)
def test_every_model_has_a_bound_of_its_own(
    serving: Any, monkeypatch: pytest.MonkeyPatch, model: str, name: str, most: int
) -> None:
    """A million characters took `safety` 100 s, in which it judged nothing else."""

    def error(loaded: Any, num_chars: int) -> Any:
        [answer] = loaded.execute([InferenceRequest([Tensor(name, np.array([[b"x" * num_chars]], np.object_))])])
        return answer.error

    loaded = opened(serving, monkeypatch, model)
    assert error(loaded, most) is None
    assert error(loaded, most + 1).number == TritonError.INVALID_ARG
    loaded = opened(serving, monkeypatch, model, max_chars="9000")
    assert error(loaded, 9000) is None
    assert error(loaded, 9001).text == f"{name}: has 9001 characters; accepted: at most 9000 (max_chars)"


def test_a_prompt_of_quality_is_bounded_by_its_name(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = opened(serving, monkeypatch, "QualityModel", max_chars="10")
    texts = [Tensor(name, np.array([[text]], np.object_)) for name, text in (("prompt", b"x" * 11), ("answer", b"y"))]
    [answer] = loaded.execute([InferenceRequest(texts)])
    assert answer.error.text == "prompt: has 11 characters; accepted: at most 10 (max_chars)"


@pytest.mark.parametrize("given", ["7999", "1000001", "many"])
def test_safety_takes_what_guarded_sends_it(serving: Any, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    with pytest.raises(ConfigError, match=r"max_chars='.*': accepted: a whole number from 8000 to 1000000"):
        opened(serving, monkeypatch, "SafetyModel", max_chars=given)
