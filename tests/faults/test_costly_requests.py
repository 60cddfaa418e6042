"""Requests at the limit of what is accepted, in size and in work per token, beside a victim on the real server."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from llm_client import grpc_infer
from llm_server import LlmServer
from victim import assert_unharmed

pytestmark = pytest.mark.alone

TOO_LARGE = "int main() { return 0; } " * 400_000  # 10 MB
MOST_BYTES = 57_000  # of the demo model's prompt: 2048 tokens of 28 bytes


def refused(server: LlmServer, model: str, inputs: dict[str, object]) -> str:
    error = grpc_infer(server.grpc_url, model, inputs).error
    assert error
    return error


def test_huge_prompts(llm_server: LlmServer) -> None:
    """As large as accepted, of one word that cannot be cut, of code, of ids; and far too large."""

    def ask() -> None:
        word, code = "a" * MOST_BYTES, TOO_LARGE[:MOST_BYTES]
        assert "accepted: at most 57344" in refused(llm_server, "llm", {"text_input": TOO_LARGE})
        for _ in range(4):
            assert "accepted: at most 2047" in refused(llm_server, "llm", {"text_input": word})
            assert "more than 2048 tokens in the first" in refused(llm_server, "llm", {"text_input": code})
        ids = np.full(1 << 20, 5, np.int32)
        assert "accepted: at most 2047" in refused(llm_server, "llm", {"input_ids": ids})

    assert_unharmed(llm_server, ask)


def test_huge_prompts_of_preprocessing(llm_server: LlmServer) -> None:
    def ask() -> None:
        assert "accepted: at most 57344" in refused(llm_server, "preprocessing", {"QUERY": TOO_LARGE})
        for _ in range(4):
            code = TOO_LARGE[:MOST_BYTES]
            assert "more than 2048 tokens in the first" in refused(llm_server, "preprocessing", {"QUERY": code})

    assert_unharmed(llm_server, ask)


def test_every_list_as_long_as_it_may_be(llm_server: LlmServer) -> None:
    """One request after the other, with everything that costs work per token."""
    words = [f"never {index:04d} !!" for index in range(1000)]
    ids = [
        [index % 4000 + 1 for index in range(16_000)] + [0] * 384,
        [16 * (i + 1) for i in range(1000)] + [-1] * 15_384,
    ]
    sampling = {
        "stop": ["\n" * size + "Q" for size in range(1, 170)],
        "stop_token_ids": list(range(3000, 4000)),
        "min_tokens": 50,
        "max_tokens": 50,
        "logit_bias": {str(token_id): 0.25 for token_id in range(1000, 2000)},
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logprobs": 20,
        "temperature": 0.7,
        "top_p": 0.9,
    }

    def ask() -> None:
        for _ in range(2):
            answer = grpc_infer(
                llm_server.grpc_url,
                "llm",
                {
                    "text_input": "\n" * 300,
                    "bad_words": words,
                    "stop_words_list": np.array(ids, np.int32),
                    "bad_words_list": np.array(ids, np.int32),
                    "embedding_bias": np.full(4096, 0.25, np.float32),
                    "sampling_parameters": json.dumps(sampling),
                    "stream": True,
                },
            )
            assert not answer.error and len(answer.responses) >= 1

    assert_unharmed(llm_server, ask)


def test_a_flood_of_requests_with_much_memory(llm_server: LlmServer) -> None:
    """Two fit beside each other, the others are refused at once; what is small is served."""
    ids = np.array([[index % 4000 + 1 for index in range(3000)], [3000] + [-1] * 2999], np.int32)
    large = {"text_input": "x", "stop_words_list": ids, "max_tokens": 60, "stream": True}
    with llm_server.variant("small_memory", {"max_total_request_bytes": 400_000}) as model:

        def ask() -> None:
            with ThreadPoolExecutor(6) as threads:
                asked = [threads.submit(grpc_infer, llm_server.grpc_url, model, large) for _ in range(12)]
                small = grpc_infer(llm_server.grpc_url, model, {"text_input": "x", "max_tokens": 3, "stream": True})
                errors = [future.result().error for future in asked]
            refusals = [error for error in errors if error]
            assert not small.error and 0 < len(refusals) < 12
            assert all("max_total_request_bytes=400000" in error for error in refusals)

        assert_unharmed(llm_server, ask, model=model)
        llm_server.wait_idle(model)
        wanted = "the memory of requests to be free"
        llm_server.wait_until(lambda: llm_server.metric("slipstream_request_memory_bytes", model) == 0, wanted)
