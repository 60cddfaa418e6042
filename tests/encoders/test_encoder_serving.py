"""Requests of the encoder models outside Triton: what one of them may have, and what it costs the others."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_python_backend import InferenceRequest, Tensor, TritonError, fake_utils

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
    most = serving.MAX_ENCODED_CHARS
    requests = [request_of("fine"), request_of("x" * (most // 2), "y" * (most // 2), "z"), request_of("fine", "too")]

    def run(are_cut: bool) -> list[Any]:
        def read(request: Any) -> list[str]:
            return serving.read_texts(request, "text", are_cut)

        def write(found: list[int]) -> dict[str, np.ndarray]:
            return {"length": np.array(found)}

        return serving.answer(requests, read, lambda texts: list(map(len, texts)), write)

    first, second, third = run(are_cut=False)
    assert first.outputs["length"].tolist() == [4] and third.outputs["length"].tolist() == [4, 3]
    assert second.error.number == TritonError.INVALID_ARG
    assert second.error.text == f"text: has {most + 1} characters; accepted: at most {most}"
    assert run(are_cut=True)[1].outputs["length"].tolist() == [most // 2, most // 2, 1]


def test_those_of_many_requests_are_judged_in_parts(serving: Any) -> None:
    """64 requests of a megabyte would have some 20 GB of tokens at once."""
    most, calls = serving.MAX_ENCODED_CHARS, list[int]()
    requests = [request_of(chr(97 + number) * (most // 4)) for number in range(10)]

    def judge(texts: list[str]) -> list[str]:
        calls.append(sum(map(len, texts)))
        return [text[0] for text in texts]

    def write(found: list[str]) -> dict[str, np.ndarray]:
        return {"letter": np.array(found)}

    answers = serving.answer(requests, lambda request: serving.read_texts(request, "text"), judge, write)
    assert [answer.outputs["letter"].tolist() for answer in answers] == [[chr(97 + number)] for number in range(10)]
    assert calls == [most, most, most // 2]
