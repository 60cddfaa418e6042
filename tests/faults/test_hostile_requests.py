"""Requests made to end the engine or to freeze it: each is answered with an error of its own, and a victim's stream
beside it keeps its tokens and its pace. Also the large answers that are legal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from llm_client import grpc_infer, http_generate
from llm_server import LlmServer
from victim import Victim, assert_unharmed, compare

pytestmark = pytest.mark.alone

PROMPT = "import os\n"
MANY = {f"p{i}": i for i in range(70_000)}  # more than a 16-bit count holds
EXTRA = {"return_logprobs": True, "exclude_input_in_output": True}
MOST_GAP_MS = 800.0
WHOLE = {"temperature": 0.0, "ignore_eos": True, "stream": False}


@pytest.fixture(autouse=True)
def no_engine_ends(llm_server: LlmServer) -> Iterator[None]:
    before = {process.pid for process in llm_server.engines()}
    yield
    llm_server.wait_until(lambda: len(llm_server.engines()) == len(before), "a variant's engine to end")
    assert {process.pid for process in llm_server.engines()} == before
    llm_server.wait_idle()


def grpc_error(server: LlmServer, sampling: dict[str, Any], parameters: dict[str, Any]) -> str:
    inputs = {"text_input": PROMPT, "sampling_parameters": json.dumps(sampling)}
    return grpc_infer(server.grpc_url, "llm", inputs, parameters=parameters).error


def http_error(server: LlmServer, sampling: dict[str, Any], parameters: dict[str, Any]) -> str:
    body = {"text_input": PROMPT, "sampling_parameters": json.dumps(sampling), **parameters}
    status, reply = http_generate(server.http_url, "llm", body)
    return str(reply["error"]) if status == 400 else f"{status} {str(reply)[:200]}"


WAYS: dict[str, Callable[[LlmServer, dict[str, Any], dict[str, Any]], str]] = {"grpc": grpc_error, "http": http_error}


def test_70000_parameters_are_refused(llm_server: LlmServer) -> None:
    def attack() -> None:
        assert "70000 request parameters, accepted: at most 1024" in grpc_error(llm_server, {}, MANY)

    assert_unharmed(llm_server, attack)
    # over HTTP the server's own reader takes seconds for as many
    assert "70000 request parameters, accepted: at most 1024" in http_error(llm_server, {}, MANY)


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_of_half_a_gigabyte_is_refused_with_the_arithmetic(llm_server: LlmServer, way: str) -> None:
    def attack() -> None:
        told = WAYS[way](llm_server, {"n": 97, "logprobs": 20, "max_tokens": 1950, **WHOLE}, EXTRA)
        assert "n=97 x 1950 tokens x (1 + logprobs=20) = 3972150 entries" in told
        assert "at most max_response_entries=1048576" in told

    assert_unharmed(llm_server, attack)


def test_a_large_answer_that_is_legal(llm_server: LlmServer) -> None:
    """Some 4 MB in one response: it is written as its tokens come, so others see no pause at its end."""
    answers = []

    def ask() -> None:
        sampling = {"n": 8, "logprobs": 20, "max_tokens": 250, **WHOLE}
        inputs = {"text_input": PROMPT, "sampling_parameters": json.dumps(sampling), "return_logprobs": True}
        answers.append(grpc_infer(llm_server.grpc_url, "llm", inputs))

    comparison = compare(llm_server, Victim(llm_server.grpc_url), ask)
    assert comparison.attacked.largest_ms < MOST_GAP_MS, str(comparison)
    [response] = answers[0].responses
    assert (answers[0].error, response["logprobs"].shape) == ("", (8,))
    for text in response["logprobs"]:
        entries = json.loads(text)
        assert len(entries) == 250 and all(20 <= len(entry) <= 21 for entry in entries)
        assert all({"logprob", "rank", "decoded_token"} == set(one) for one in entries[-1].values())


def test_a_stop_by_id_is_refused_unless_the_model_allows_it(llm_server: LlmServer) -> None:
    with llm_server.variant("cautious", {"load_format": "null", "max_response_entries": 100}) as model:
        told = grpc_infer(llm_server.grpc_url, model, {"stop": True}, request_id="anybody's").error
        assert "stop: got True, accepted: False (the model has stop_by_request_id off)" in told
        inputs = {"text_input": PROMPT, "max_tokens": 60, "num_return_sequences": 2}
        whole = grpc_infer(llm_server.grpc_url, model, inputs).error
        assert "n=2 x 60 tokens x (1 + logprobs=0)" in whole and "max_response_entries=100" in whole
        streamed = grpc_infer(llm_server.grpc_url, model, {**inputs, "stream": True})
        assert streamed.error == "" and sum(map(np.size, streamed.all("text_output"))) == 120
