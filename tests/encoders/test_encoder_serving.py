"""Requests of the encoder models outside Triton: what one of them may have, and what it costs the others."""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_python_backend import InferenceRequest, Tensor, TritonError, fake_utils
from patience import PATIENCE_S
from slipstream.core.errors import ConfigError
from slipstream.encoders import short_first

MODULE = "slipstream.encoders.serving"


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_utils())
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def request_of(*texts: str) -> InferenceRequest:
    return InferenceRequest([Tensor("text", np.array([[text.encode()] for text in texts], np.object_))])


def answers(model: Any, requests: list[InferenceRequest]) -> list[Any]:
    """The one response of each request, from a model or its Served."""
    (model.execute if hasattr(model, "execute") else model.take)(requests)
    found = [request.sender.wait() for request in requests]
    assert all(len(one.sent) == 1 for one in found)
    return [one.sent[0] for one in found]


def test_the_texts_of_a_request_are_bounded_together(serving: Any) -> None:
    most = 100
    texts = ["fine"], ["x" * (most // 2), "y" * (most // 2), "z"], ["fine", "too"]

    def run(is_of_each: bool) -> list[Any]:
        requests = [request_of(*one) for one in texts]

        def read(request: Any) -> list[str]:
            return serving.read_texts(request, "text", serving.CharBound(most, is_of_each=is_of_each))

        def write(found: list[int]) -> dict[str, np.ndarray]:
            return {"length": np.array(found)}

        return answers(serving.Served(Judge(), read, lambda texts: list(map(len, texts)), write), requests)

    first, second, third = run(is_of_each=False)
    assert first.outputs["length"].tolist() == [4] and third.outputs["length"].tolist() == [4, 3]
    assert second.error.number == TritonError.INVALID_ARG
    assert second.error.text == f"text: has {most + 1} characters; accepted: at most {most} (max_chars)"
    assert run(is_of_each=True)[1].outputs["length"].tolist() == [most // 2, most // 2, 1]


def test_many_texts_of_a_request_are_judged_in_parts(serving: Any) -> None:
    """64 of a megabyte would have some 20 GB of tokens at once."""
    most, calls = serving.MAX_ENCODED_CHARS, list[int]()
    letters = [chr(97 + number) for number in range(10)]

    def judge(texts: list[str]) -> list[str]:
        calls.append(sum(map(len, texts)))
        return [text[0] for text in texts]

    def write(found: list[str]) -> dict[str, np.ndarray]:
        return {"letter": np.array(found)}

    bound = serving.CharBound(most, is_of_each=True)
    served = serving.Served(Judge(), lambda request: serving.read_texts(request, "text", bound), judge, write)
    [answer] = answers(served, [request_of(*(letter * (most // 4) for letter in letters))])
    assert answer.outputs["letter"].tolist() == letters
    assert calls == [most, most, most // 2]


class Judge:
    """Takes no time for any text, and flags none; its encoder, too."""

    names, max_rows, max_read_chars = ("violence",), 32, 1000
    encoder = property(lambda self: self)
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
        [answer] = answers(loaded, [InferenceRequest([Tensor(name, np.array([[b"x" * num_chars]], np.object_))])])
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
    [answer] = answers(loaded, [InferenceRequest(texts)])
    assert answer.error.text == "prompt: has 11 characters; accepted: at most 10 (max_chars)"


@pytest.mark.parametrize("given", ["7999", "1000001", "many"])
def test_safety_takes_what_guarded_sends_it(serving: Any, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    with pytest.raises(ConfigError, match=r"max_chars='.*': accepted: a whole number from 8000 to 1000000"):
        opened(serving, monkeypatch, "SafetyModel", max_chars=given)


def test_a_short_text_does_not_wait_for_long_ones(serving: Any) -> None:
    """It was answered with the largest that had come at the same time, and behind all of an earlier batch."""
    began, came, runs = threading.Event(), threading.Event(), list[list[int]]()
    encoder = Judge()

    def judge(texts: list[str]) -> list[int]:
        runs.append(list(map(len, texts)))
        if len(texts[0]) == 30_000:
            began.set()
            assert came.wait(PATIENCE_S)
            encoder.between_runs()
        return list(map(len, texts))

    def read(request: Any) -> list[str]:
        return serving.read_texts(request, "text", serving.CharBound(32_000))

    served = serving.Served(encoder, read, judge, lambda lengths: {"length": np.array(lengths)})
    first = request_of("x" * 30_000)
    served.take([first])
    assert began.wait(PATIENCE_S)
    others = [request_of("x" * length) for length in (31_000, 90, 29_000, 7000, 80, 29_500)]
    served.take(others)
    came.set()
    for request in (first, *others):
        request.sender.wait()
    assert runs[0] == [30_000] and sorted(runs[1]) == [80, 90, 7000], "the short ones together, within the long one"
    assert runs[2:] == [[29_000], [29_500], [31_000]], "the longest last, each by itself"
    assert [one.sender.sent[0].outputs["length"].tolist() for one in others][:2] == [[31_000], [90]]
    served.close()


def test_long_texts_are_not_passed_for_ever(serving: Any) -> None:
    """A text of 320 characters lets those pass that come in the next 0.1 s, and no others."""
    seen, turns = list[int](), None

    def compute(rows: list[int]) -> list[int]:
        seen.extend(rows)
        if len(seen) < 2:
            time.sleep(0.15)
        elif len(seen) < 40:
            turns.submit([len(seen)], 1, lambda found: None)
        return rows

    turns = short_first.ShortFirst(compute, 1)
    turns.submit([-1], 1, lambda found: None)
    turns.submit([-320], 320, lambda found: None)
    turns.submit([0], 1, lambda found: None)
    turns.close()
    assert seen[:3] == [-1, 0, -320], "by now it has waited, and goes before those that come"


def test_a_text_that_fails_costs_no_other_its_answer(serving: Any) -> None:
    began = threading.Event()

    def judge(texts: list[str]) -> list[int]:
        assert began.wait(PATIENCE_S)
        if "bad" in texts:
            raise RuntimeError("of a library")
        return list(map(len, texts))

    def read(request: Any) -> list[str]:
        return serving.read_texts(request, "text", serving.CharBound(100))

    served = serving.Served(Judge(), read, judge, lambda lengths: {"length": np.array(lengths)})
    requests = [request_of(text) for text in ("first", "fine", "bad", "too")]
    served.take(requests)
    began.set()
    found = [request.sender.wait().sent[0] for request in requests]
    assert [one.error and one.error.number for one in found] == [None, None, TritonError.INTERNAL, None]
    assert [one.outputs["length"].tolist() for one in found if not one.error] == [[5], [4], [3]]
    served.close()


def test_a_request_that_cannot_be_read_costs_no_other_its_answer(serving: Any) -> None:
    """What reading it raised went to the server, which refused all of the batch: also what was to be answered later."""

    def read(request: Any) -> list[str]:
        texts: list[str] = serving.read_texts(request, "text", serving.CharBound(100))
        if "broken" in texts:
            raise ValueError("the library cannot decode the tensor")
        return texts

    served = serving.Served(Judge(), read, lambda texts: list(map(len, texts)), lambda one: {"length": np.array(one)})
    first, broken, last = answers(served, [request_of(text) for text in ("first", "broken", "last")])
    assert broken.error.number == TritonError.INTERNAL and "ValueError" not in broken.error.text
    assert [one.outputs["length"].tolist() for one in (first, last)] == [[5], [4]]
    served.close()


def test_what_waits_is_bounded_by_the_server_s_own_queue() -> None:
    began, goes_on, done = threading.Event(), threading.Event(), list[int]()

    def compute(rows: list[int]) -> list[int]:
        began.set()
        assert goes_on.wait(PATIENCE_S)
        return rows

    turns = short_first.ShortFirst(compute, 1)
    turns.submit([0], 1, done.extend)
    assert began.wait(PATIENCE_S)
    turns.submit([1], short_first.MAX_WAITING, done.extend)
    blocked = threading.Thread(target=turns.submit, args=([2], 1, done.extend))
    blocked.start()
    blocked.join(0.1)
    assert blocked.is_alive()
    goes_on.set()
    blocked.join(PATIENCE_S)
    turns.close()
    assert sorted(done) == [0, 1, 2]
