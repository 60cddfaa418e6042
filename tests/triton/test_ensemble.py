"""`ensemble`, `preprocessing` and `postprocessing` with TensorRT-LLM's tensors: the same text as `llm`, exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llm_client import Answer, grpc_infer, grpc_stream, http_generate, http_stream
from llm_server import LlmServer

PROMPT = "def fibonacci(n):\n"
GREEDY = {"max_tokens": 24, "temperature": 0.0}


def ensemble(server: LlmServer, inputs: dict[str, Any], **options: Any) -> Answer:
    answer = grpc_infer(server.grpc_url, "ensemble", inputs, batched=True, **options)
    assert not answer.error, answer.error
    return answer


def test_streaming_gives_the_text_of_llm(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    answer = ensemble(llm_server, {"text_input": PROMPT, "stream": True, **GREEDY})
    assert answer.text == greedy(PROMPT)
    assert len(answer.responses) > 12, "not streamed"
    assert answer.responses[0]["text_output"].shape == (1, 1)


def test_in_one_response(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    inputs = {"text_input": PROMPT, "exclude_input_in_output": True, **GREEDY}
    answer = ensemble(llm_server, inputs, outputs=("text_output",))
    assert (len(answer.responses), answer.text) == (1, greedy(PROMPT))
    echoed = ensemble(llm_server, {**inputs, "exclude_input_in_output": False}, outputs=("text_output",))
    assert echoed.text == PROMPT + greedy(PROMPT)


def test_http(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    body = {"text_input": PROMPT, **GREEDY}
    status, reply = http_generate(llm_server.http_url, "ensemble", {**body, "exclude_input_in_output": True})
    assert (status, reply.get("text_output")) == (200, greedy(PROMPT)), reply
    events = http_stream(llm_server.http_url, "ensemble", body)
    assert "".join(event["text_output"] for event in events) == greedy(PROMPT)


def test_text_is_exact_across_characters_of_several_tokens(llm_server: LlmServer) -> None:
    """A prompt that makes the demo model write bytes beyond ASCII; each piece decoded alone would be garbage."""
    prompt = "# -*- coding: utf-8 -*-\n# Grüße: äöü, 日本語, 🚀\ntext = 'äöü日本語🚀"
    sampling = {"max_tokens": 48, "temperature": 1.3, "seed": 5}
    direct = grpc_infer(llm_server.grpc_url, "llm", {"text_input": prompt, "stream": True}, parameters=sampling)
    seed = np.array([5], np.uint64)
    through = ensemble(llm_server, {"text_input": prompt, "stream": True, **sampling, "seed": seed})
    assert through.text == direct.text


def test_optional_inputs_given_and_absent(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    """Only text_input and max_tokens are mandatory in TensorRT-LLM; here max_tokens has the model's default too."""
    assert ensemble(llm_server, {"text_input": PROMPT}, outputs=("text_output",)).text
    given = {
        "top_k": 1,
        "top_p": 1.0,
        "min_tokens": 1,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": np.array([3], np.uint64),
        "beam_width": 1,
        "length_penalty": 1.0,
        "pad_id": 2,
        "bad_words": ["zzzz"],
        "return_log_probs": False,
    }
    answer = ensemble(llm_server, {"text_input": PROMPT, "stream": True, "max_tokens": 24, **given})
    assert answer.text == greedy(PROMPT)


def test_the_openai_frontend_of_triton_is_served(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    """Exactly the tensors of its TensorRT-LLM format; it sums num_output_tokens up over a stream."""
    word = greedy(PROMPT)[8:12]
    always = {"text_input": PROMPT, "max_tokens": 24, "return_num_input_tokens": True, "return_num_output_tokens": True}
    if_set = {
        "stop_words": [word, "zzzz"],
        "top_p": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "temperature": 0.0,
        "seed": np.array([7], np.uint64),
        "exclude_input_in_output": True,
    }
    num_prompt_tokens = grpc_infer(llm_server.grpc_url, "preprocessing", {"QUERY": PROMPT}).last("REQUEST_INPUT_LEN")
    for optional, text in (({"temperature": 0.0}, greedy(PROMPT)), (if_set, greedy(PROMPT).partition(word)[0])):
        for stream in (True, False):
            inputs = {**always, **optional, "stream": stream, "exclude_input_in_output": True}
            answer = ensemble(llm_server, inputs)
            assert answer.text == text
            assert all(response["text_output"].size == 1 for response in answer.responses)
            assert set(answer.all("num_input_tokens")) == {num_prompt_tokens}
            num_tokens = int(sum(answer.all("num_output_tokens")))
            assert num_tokens == 24 if optional is not if_set else 0 < num_tokens < 24
            assert answer.responses[0]["num_output_tokens"].dtype == np.uint32


def test_the_openai_frontend_asks_for_a_tool_call(llm_server: LlmServer) -> None:
    schema = (
        '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false}'
    )
    guide = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": schema}
    counted = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    answer = ensemble(llm_server, {"text_input": PROMPT, "stream": True, **GREEDY, **counted, **guide})
    assert json.loads(answer.text)["a"] in (1, 2)


def test_stop_words(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    word = greedy(PROMPT)[8:12]
    answer = ensemble(llm_server, {"text_input": PROMPT, "stream": True, **GREEDY, "stop_words": [word]})
    assert answer.text == greedy(PROMPT).partition(word)[0]


def test_log_probabilities_and_cache_figures(llm_server: LlmServer) -> None:
    answer = ensemble(llm_server, {"text_input": PROMPT, "stream": True, "return_log_probs": True, **GREEDY})
    assert answer.last("cum_log_probs") < 0
    assert answer.last("kv_cache_alloc_total_blocks") >= 1
    assert answer.last("total_draft_tokens") == 0


@pytest.mark.parametrize("text", ["def add(a, b):", "Grüße 🚀 日本語", "  two  spaces ", "\ttab\n\n"])
def test_preprocessing_and_postprocessing_are_inverse(llm_server: LlmServer, text: str) -> None:
    made = grpc_infer(llm_server.grpc_url, "preprocessing", {"QUERY": text, "REQUEST_OUTPUT_LEN": 5}).responses[0]
    ids = made["INPUT_ID"]
    assert made["REQUEST_INPUT_LEN"][0] == len(ids) and made["REQUEST_OUTPUT_LEN"][0] == 5
    tokens = {"TOKENS_BATCH": ids[None].astype(np.int32), "SEQUENCE_LENGTH": len(ids)}
    back = grpc_infer(llm_server.grpc_url, "postprocessing", tokens).responses[0]
    assert back["OUTPUT"][0].decode() == text


def test_a_bad_request_is_answered_through_the_ensemble(llm_server: LlmServer) -> None:
    inputs = {"text_input": PROMPT, "max_tokens": 4, "temperature": -1.0}
    answer = grpc_infer(llm_server.grpc_url, "ensemble", inputs, batched=True)
    assert "temperature" in answer.error
    llm_server.wait_idle()


def test_two_requests_on_one_stream(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    with grpc_stream(llm_server.grpc_url) as stream:
        texts = []
        for prompt in (PROMPT, "import os\n"):
            stream.send("ensemble", {"text_input": prompt, "stream": True, **GREEDY}, batched=True)
            texts.append(stream.collect().text)
    assert texts == [greedy(PROMPT), greedy("import os\n")]


def test_logits_come_with_the_tensors_of_tensorrt_llm(llm_server: LlmServer) -> None:
    inputs = {"text_input": PROMPT, **GREEDY, "return_context_logits": True, "return_generation_logits": True}
    direct = grpc_infer(llm_server.grpc_url, "llm", {**inputs, "stream": True, "return_output_ids": True})
    assert not direct.error, direct.error
    (context,) = (found["context_logits"] for found in direct.responses if found["context_logits"].size)
    generation = np.concatenate([found["generation_logits"][0] for found in direct.responses])
    token_ids = np.concatenate([found["output_ids"][0] for found in direct.responses])
    assert generation.argmax(axis=1).tolist() == token_ids.tolist()
    np.testing.assert_allclose(context[-1], generation[0], atol=1e-3)  # the first new token is drawn from it

    through = ensemble(llm_server, inputs)
    (response,) = through.responses
    assert response["generation_logits"].shape == (1, 1, *generation.shape)
    np.testing.assert_allclose(response["generation_logits"][0, 0], generation, atol=1e-3)
    assert response["context_logits"].shape == (1, *context.shape)
    without = ensemble(llm_server, {"text_input": PROMPT, **GREEDY})
    assert all(not response["context_logits"].size for response in without.responses)

    refused = grpc_infer(llm_server.grpc_url, "llm", {**inputs, "num_return_sequences": 8, "max_tokens": 500})
    assert "max_logits_bytes" in refused.error
