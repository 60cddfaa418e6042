"""`llm` on the real server: every way in gives the engine's own text; contracts, errors, options, metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from llm_client import grpc_infer, http_generate, http_stream
from llm_server import LlmServer

PROMPT = "def fibonacci(n):\n"
GREEDY = {"max_tokens": 24, "temperature": 0.0}
N_SEQUENCES = {"max_tokens": 8, "temperature": 1.0, "n": 3, "seed": 7, "ignore_eos": True}


def infer(server: LlmServer, inputs: dict[str, Any], **options: Any) -> Any:
    answer = grpc_infer(server.grpc_url, "llm", inputs, **options)
    assert not answer.error, answer.error
    return answer


# ---------------------------------------------------------------- every way in, one text


def test_grpc_stream(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    answer = infer(llm_server, {"text_input": PROMPT, "stream": True, "sampling_parameters": json.dumps(GREEDY)})
    assert answer.text == greedy(PROMPT)
    assert len(answer.responses) > 12, "not streamed"


def test_grpc_in_one_response(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    """As the vLLM backend has it: a whole answer begins with the prompt unless that is excluded."""
    inputs = {"text_input": PROMPT, "sampling_parameters": json.dumps(GREEDY)}
    echoed = infer(llm_server, inputs)
    assert len(echoed.responses) == 1
    assert echoed.text == PROMPT + greedy(PROMPT)
    assert infer(llm_server, {**inputs, "exclude_input_in_output": True}).text == greedy(PROMPT)


def test_grpc_request_parameters(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    answer = infer(llm_server, {"text_input": PROMPT}, parameters={"max_tokens": 24, "temperature": 0, "stream": True})
    assert answer.text == greedy(PROMPT)


def test_tensorrt_llm_tensors_and_token_ids(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    ids = grpc_infer(llm_server.grpc_url, "preprocessing", {"QUERY": PROMPT}).responses[0]["INPUT_ID"]
    inputs = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 24, "runtime_top_k": 1}
    answer = infer(llm_server, {**inputs, "streaming": True, "return_output_ids": True})
    assert answer.text == greedy(PROMPT)
    assert sum(answer.all("sequence_length")) == 24


def test_http_generate(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    status, reply = http_generate(
        llm_server.http_url, "llm", {"text_input": PROMPT, "exclude_input_in_output": True, **GREEDY}
    )
    assert (status, reply.get("text_output")) == (200, greedy(PROMPT)), reply


def test_http_generate_stream(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    events = http_stream(llm_server.http_url, "llm", {"text_input": PROMPT, **GREEDY})
    assert "".join(event["text_output"] for event in events) == greedy(PROMPT)
    assert len(events) > 12, "not streamed"


def test_concurrent_streams_do_not_mix(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    prompts = [f"def function_{index}(a, b):\n" for index in range(12)]

    def stream(prompt: str) -> str:
        inputs = {"text_input": prompt, "stream": True, "sampling_parameters": json.dumps(GREEDY)}
        return infer(llm_server, inputs).text

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(stream, prompts)) == [greedy(prompt) for prompt in prompts]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"temprature": 0.5}, "temprature"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"beam_width": 11}, "beam_width"),
        ({"sampling_parameters": "{not json"}, "sampling_parameters"),
        ({"sampling_parameters": '{"tempature": 1}'}, "tempature"),
        ({"guided_decoding_guide_type": "poem", "guided_decoding_guide": "x"}, "guided_decoding_guide_type"),
    ],
)
def test_a_wrong_field_is_named(llm_server: LlmServer, body: dict[str, Any], named: str) -> None:
    status, reply = http_generate(llm_server.http_url, "llm", {"text_input": PROMPT, **body})
    assert status == 400
    assert named in reply["error"]


def test_a_wrong_json_type_is_refused_by_triton_itself(llm_server: LlmServer) -> None:
    """docs/clients.md says so: the request does not come as far as the backend, and no field is named."""
    status, reply = http_generate(llm_server.http_url, "llm", {"text_input": PROMPT, "max_tokens": "four"})
    assert (status, reply["error"].partition(":")[0]) == (500, "Unable to parse 'data'"), reply


def test_a_wrong_field_is_invalid_argument_over_grpc(llm_server: LlmServer) -> None:
    answer = grpc_infer(llm_server.grpc_url, "llm", {"text_input": PROMPT}, parameters={"temprature": 1})
    assert "temprature" in answer.error and not answer.responses


# ---------------------------------------------------------------- options


def test_n_sequences(llm_server: LlmServer) -> None:
    inputs = {"text_input": PROMPT, "stream": True, "sampling_parameters": json.dumps(N_SEQUENCES)}
    answer = infer(llm_server, inputs, outputs=("text_output", "sequence_index", "finish_reason"))
    texts = dict.fromkeys(range(3), "")
    for response in answer.responses:
        texts[int(response["sequence_index"][0])] += response["text_output"][0].decode()
    assert all(texts.values()) and len(set(texts.values())) > 1
    assert sorted(filter(None, answer.all("finish_reason"))) == [b"length"] * 3


@pytest.mark.parametrize(
    "settings", [{"beam_width": 3}, {"use_beam_search": True, "n": 3}, {"beam_width": 3, "num_return_sequences": 3}]
)
def test_beam_search_by_the_names_of_either_backend(llm_server: LlmServer, settings: dict[str, Any]) -> None:
    inputs = {"text_input": PROMPT, "exclude_input_in_output": True, "return_cumulative_logprob": True}
    given = {"max_tokens": 6, "ignore_eos": True, **settings}
    inputs["sampling_parameters"] = json.dumps(given)
    [response] = infer(llm_server, inputs, outputs=("text_output", "cumulative_logprob")).responses
    assert len(set(response["text_output"])) == 3
    sums = list(response["cumulative_logprob"])
    assert sums == sorted(sums, reverse=True) and sums[0] < 0


def test_n_sequences_share_one_response_unless_streaming(llm_server: LlmServer) -> None:
    """As the vLLM backend has it: one response of n strings, in the order of the sequences."""
    inputs = {"text_input": PROMPT, "exclude_input_in_output": True, "sampling_parameters": json.dumps(N_SEQUENCES)}
    flags = dict.fromkeys(("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"), True)
    [whole] = infer(llm_server, {**inputs, **flags}).responses
    streamed = infer(llm_server, {**inputs, "stream": True}, outputs=("text_output", "sequence_index"))
    texts = [b"", b"", b""]
    for response in streamed.responses:
        texts[int(response["sequence_index"][0])] += response["text_output"][0]
    assert whole["text_output"].tolist() == texts
    assert whole["finish_reason"].tolist() == [b"length"] * 3 and whole["num_output_tokens"].tolist() == [8] * 3
    assert whole["num_input_tokens"].shape == (1,)


def test_n_sequences_over_http_generate(llm_server: LlmServer) -> None:
    status, reply = http_generate(llm_server.http_url, "llm", {"text_input": PROMPT, **N_SEQUENCES})
    assert status == 200, reply
    assert len(reply["text_output"]) == 3 and all(text.startswith(PROMPT) for text in reply["text_output"])


def test_n_sequences_that_are_stopped_share_one_response(llm_server: LlmServer) -> None:
    """A time limit ends all of them, a stop string one earlier than the others: still one response."""
    late = {**N_SEQUENCES, "max_tokens": 1500, "timeout_ms": 200}
    inputs = {"text_input": PROMPT, "return_finish_reason": True}
    [response] = infer(llm_server, inputs, parameters=late).responses
    assert response["finish_reason"].tolist() == [b"timeout"] * 3
    [response] = infer(
        llm_server, {**inputs, "stop_words": ["e"]}, parameters={**N_SEQUENCES, "max_tokens": 64}
    ).responses
    assert len(response["text_output"]) == 3 and b"stop" in response["finish_reason"].tolist()
    llm_server.wait_idle()


def test_num_return_sequences_answer_apart_in_the_ensemble(llm_server: LlmServer) -> None:
    """As TensorRT-LLM's decoupled models have it: a response per sequence, told apart by sequence_index."""
    inputs = {"text_input": PROMPT, "max_tokens": 8, "num_return_sequences": 2, "seed": np.array([7], np.uint64)}
    answer = grpc_infer(llm_server.grpc_url, "ensemble", inputs, batched=True)
    assert answer.error == "" and sorted(answer.all("sequence_index")) == [0, 1]
    assert all(response["text_output"].shape == (1, 1) for response in answer.responses)


def test_same_seed_same_text(llm_server: LlmServer) -> None:
    sampling = {"max_tokens": 16, "temperature": 1.0, "seed": 11}
    inputs = {"text_input": PROMPT, "sampling_parameters": json.dumps(sampling)}
    first, again = infer(llm_server, inputs).text, infer(llm_server, inputs).text
    other = infer(llm_server, {**inputs, "sampling_parameters": json.dumps({**sampling, "seed": 12})}).text
    assert first == again != other


def test_stop_words_end_the_text_before_them(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    word = greedy(PROMPT)[8:12]
    inputs = {"text_input": PROMPT, "max_tokens": 24, "temperature": 0.0, "stream": True, "stop_words": [word]}
    answer = infer(llm_server, {**inputs, "return_finish_reason": True})
    assert answer.text == greedy(PROMPT).partition(word)[0]
    assert answer.last("finish_reason") == b"stop"


def test_guided_decoding(llm_server: LlmServer) -> None:
    inputs = {"text_input": PROMPT, "max_tokens": 12, "temperature": 1.0, "stream": True}
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9]{4}-[0-9]{2}"}
    year, _, month = infer(llm_server, {**inputs, **guide}).text.partition("-")
    assert (len(year), len(month)) == (4, 2) and (year + month).isdigit()


def test_log_probabilities(llm_server: LlmServer) -> None:
    inputs = {"text_input": PROMPT, "stream": True, "return_logprobs": True, "return_log_probs": True}
    sampling = json.dumps({**GREEDY, "max_tokens": 5, "logprobs": 2})
    answer = infer(llm_server, {**inputs, "sampling_parameters": sampling})
    tokens = [entry for raw in answer.all("logprobs") for entry in json.loads(raw)]
    assert len(tokens) == 5 and all(len(token) >= 2 for token in tokens)
    chosen = [next(iter(token.values())) for token in tokens]
    assert all(one["rank"] == 1 and one["logprob"] <= 0 for one in chosen), "greedy takes the likeliest"
    assert answer.last("cum_log_probs") == pytest.approx(sum(one["logprob"] for one in chosen), rel=1e-4)


def test_usage_and_timing_outputs(llm_server: LlmServer) -> None:
    flags = dict.fromkeys(("return_num_input_tokens", "return_num_output_tokens", "return_perf_metrics"), True)
    answer = infer(llm_server, {"text_input": PROMPT, "stream": True, **flags}, parameters=GREEDY)
    assert sum(answer.all("num_output_tokens")) == 24
    assert answer.last("num_input_tokens") > 0
    times = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
    values = [int(answer.last(name)) for name in times]
    assert values == sorted(values) and abs(values[-1] / 1e9 - time.time()) < 60
    assert answer.last("kv_cache_alloc_total_blocks") >= 1


def test_stream_interval_coalesces_but_not_the_first_token(llm_server: LlmServer) -> None:
    inputs = {"text_input": PROMPT, "stream": True, "stream_interval": 8, "return_num_output_tokens": True}
    counts = infer(llm_server, {**inputs, "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}).all(
        "num_output_tokens"
    )
    assert sum(counts) == 24 and counts[0] == 1 and len(counts) <= 5


# ---------------------------------------------------------------- the server around it


def test_a_prefix_is_found_again_and_metrics_move(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    prompt = "import os\nimport sys\n" * 40  # several blocks
    before = llm_server.settled("slipstream_generation_tokens_total")
    for _ in range(2):
        inputs = {"text_input": prompt, "stream": True, "sampling_parameters": json.dumps(GREEDY)}
        assert infer(llm_server, inputs).text == greedy(prompt)
    llm_server.wait_counted(before + 48, "slipstream_generation_tokens_total")
    assert llm_server.metric("slipstream_prefix_cache_hits_tokens_total") > 0
    assert llm_server.metric("slipstream_requests_finished_total", reason="length") > 0
    assert llm_server.metric("slipstream_time_to_first_token_seconds_count") > 0
    assert llm_server.metric("slipstream_kv_blocks_free") == llm_server.metric("slipstream_kv_blocks_total")
    generated = llm_server.settled("slipstream_generation_tokens_total")
    assert llm_server.metric("vllm:generation_tokens_total", model_name="llm") == generated
    for family in (
        "vllm:time_per_output_token_seconds_count",
        "vllm:request_params_n_count",
        "nv_llm_input_token_len_sum",
    ):
        assert llm_server.metric(family) > 0
    blocks = llm_server.metric("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="max")
    assert blocks == llm_server.metric("slipstream_kv_blocks_total") > 0


def test_the_config_was_completed(llm_server: LlmServer) -> None:
    config = json.loads(llm_server.get("/v2/models/llm/config")[1])
    names = {tensor["name"] for tensor in config["input"]}
    assert {"text_input", "input_ids", "sampling_parameters", "guided_decoding_guide"} <= names
    assert config["model_transaction_policy"]["decoupled"] is True
    assert llm_server.is_model_ready("llm")


def test_batch_dimension_by_configuration(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    """max_batch_size 1 in config.pbtxt: TensorRT-LLM's shapes, [1, 1], directly at the model."""
    llm_server.add_variant("batched", {})
    path = llm_server.repository / "batched/config.pbtxt"
    path.write_text(path.read_text() + "max_batch_size: 1\n")
    assert llm_server.load("batched")[0] == 200
    inputs = {"text_input": PROMPT, "max_tokens": 24, "temperature": 0.0, "stream": True}
    answer = grpc_infer(llm_server.grpc_url, "batched", inputs, batched=True)
    llm_server.unload("batched")
    assert (answer.error, answer.text) == ("", greedy(PROMPT))
    assert answer.responses[0]["text_output"].shape == (1, 1)


def test_one_response_by_configuration(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    """decoupled: false in config.pbtxt: plain infer calls, and the model goes on after what it refuses."""
    llm_server.add_variant("one_response", {})
    path = llm_server.repository / "one_response/config.pbtxt"
    path.write_text(path.read_text() + "model_transaction_policy { decoupled: false }\n")
    assert llm_server.load("one_response")[0] == 200

    def infer_plainly(**parameters: Any) -> tuple[int, dict[str, Any]]:
        prompt = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}
        options = {**GREEDY, "exclude_input_in_output": True, **parameters}
        request = {"inputs": [prompt], "parameters": options, "outputs": [{"name": "text_output"}]}
        status, body = llm_server.post("/v2/models/one_response/infer", request)
        return status, json.loads(body)

    try:
        for refused in ({"stream": True}, {"max_tokens": -1}):
            status, reply = infer_plainly(**refused)
            assert status == 400 and reply["error"].startswith(f"{next(iter(refused))}: got "), reply
            status, reply = infer_plainly()
            assert (status, reply["outputs"][0]["data"]) == (200, [greedy(PROMPT)])
    finally:
        llm_server.unload("one_response")


def test_numbers_of_numpy(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    """What tritonclient users send: arrays of the declared types."""
    arrays = {"max_tokens": np.array([24], np.int32), "temperature": np.array([0], np.float32)}
    answer = infer(llm_server, {"text_input": PROMPT, "stream": np.array([True]), **arrays})
    assert answer.text == greedy(PROMPT)
