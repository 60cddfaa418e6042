"""Conformance, a test per tensor of the contract: taken as a tensor over gRPC and, a scalar, as a parameter over HTTP.

Tokens are drawn here as for a client who says nothing of it, so no end token may make an answer shorter (ignore_eos).

A tensor that is served must be accepted with an ordinary value; one that is declared for other clients' sake with its
neutral value, and refused by name with another. Every output must come with its declared type and rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llm_client import grpc_infer, http_generate
from llm_server import LlmServer
from slipstream.core.wire_messages import DataType
from slipstream.protocol.contract import GENERATE
from slipstream.protocol.tensor_spec import InputSpec, OutputSpec, Use

NUMPY = {
    DataType.BOOL: np.bool_,
    DataType.BYTES: np.object_,
    DataType.FP16: np.float16,
    DataType.FP32: np.float32,
    DataType.INT32: np.int32,
    DataType.INT64: np.int64,
    DataType.UINT8: np.uint8,
    DataType.UINT32: np.uint32,
    DataType.UINT64: np.uint64,
}
PROMPT = {"text_input": "def add(a, b):\n"}

# an ordinary value by the setting that a tensor sets; anything not here is its type's own: 1, 0.5, True
ORDINARY: dict[str, Any] = {
    "prompt": "def add(a, b):\n",
    "prompt_token_ids": [5, 6, 7],
    "sampling_parameters": '{"temperature": 0.5}',
    "max_tokens": 4,
    "min_tokens": 2,
    "end_id": 3,
    "stop": ["xyz"],
    "stop_words_ids": [[9, 8], [2, -1]],
    "bad_words": ["xyz"],
    "bad_words_ids": [[9, 8], [2, -1]],
    "seed": 7,
    "n": 2,
    "top_k": 5,
    "guided_decoding_guide_type": "regex",
    "guided_decoding_guide": "[a-z]+",
    "timeout_ms": 60000,
    "cache_salt": "tenant",
    "stream_interval": 2,
    "stop_request": False,
    "exclude_input_in_output": True,
    "embedding_bias_words": ["return"],
    "embedding_bias_weights": [1.0],
    "speculative_method": "none",
    "num_draft_tokens": 0,  # more is refused by a model that drafts nothing
    "speculative_acceptance": "exact",
}
# tensors that mean something only together with others
COMPANIONS: dict[str, dict[str, Any]] = {
    "input_lengths": {"input_ids": [5, 6, 7]},
    "embedding_bias_words": {"embedding_bias_weights": [1.0]},
    "embedding_bias_weights": {"embedding_bias_words": ["return"]},
    "guided_decoding_guide_type": {"guided_decoding_guide": "[a-z]+"},
    "guided_decoding_guide": {"guided_decoding_guide_type": "regex"},
    "return_logprobs": {},
}


def shaped(spec: InputSpec, value: Any) -> np.ndarray:
    """value as an array of the tensor's declared type and rank."""
    values = np.array(value, dtype=np.object_).reshape(-1)
    if spec.dtype is DataType.BYTES:
        values = np.array([v.encode() if isinstance(v, str) else v for v in values], dtype=np.object_)
    array = values.astype(NUMPY[spec.dtype])
    if len(spec.dims) == 1:
        return array
    return array.reshape([size if size > 0 else 1 for size in spec.dims[:-1]] + [-1])


def ordinary(spec: InputSpec) -> Any:
    by_type = {DataType.BOOL: True, DataType.FP32: 0.5, DataType.BYTES: "x"}
    return ORDINARY.get(spec.target, by_type.get(spec.dtype, 1))


def ask(server: LlmServer, tensors: dict[str, Any]) -> str:
    """The error of a short request, "" if it was served."""
    inputs = tensors if {"text_input", "input_ids"} & set(tensors) else {**PROMPT, **tensors}
    has_length = {"max_tokens", "request_output_len", "sampling_param_max_tokens"} & set(inputs)
    parameters = {"ignore_eos": True, **({} if has_length else {"max_tokens": 4})}
    return grpc_infer(server.grpc_url, "llm", inputs, parameters=parameters, request_id="conformance").error


# served by a model with `enable_lora`: test_lora_on_server.py
OF_ADAPTERS = ("lora_name", "lora_task_id", "lora_weights", "lora_config", "lora_path")
OF_TABLES = ("prompt_embedding_table", "prompt_vocab_size")  # test_prompt_tables_on_server.py
ELSEWHERE = (*OF_ADAPTERS, *OF_TABLES)
SERVED = [spec for spec in GENERATE.inputs if spec.use is not Use.NEUTRAL_ONLY and spec.name not in ELSEWHERE]
NEUTRAL = [spec for spec in GENERATE.inputs if spec.use is Use.NEUTRAL_ONLY]


def name(spec: InputSpec | OutputSpec) -> str:
    return spec.name


@pytest.mark.parametrize("spec", SERVED, ids=name)
def test_a_served_tensor_is_taken(llm_server: LlmServer, spec: InputSpec) -> None:
    value = ordinary(spec)
    if spec.target == "embedding_bias":
        value = np.zeros(len_of_vocabulary(llm_server), np.float32)
    error = ask(llm_server, {spec.name: shaped(spec, value), **COMPANIONS.get(spec.name, {})})
    assert error == ""


@pytest.mark.parametrize("spec", [s for s in SERVED if s.dims == (1,)], ids=name)
def test_a_scalar_is_taken_as_a_parameter_over_http(llm_server: LlmServer, spec: InputSpec) -> None:
    body = {**PROMPT, "max_tokens": 4, "ignore_eos": True, **COMPANIONS.get(spec.name, {}), spec.name: ordinary(spec)}
    if spec.target == "max_tokens" and spec.name != "max_tokens":
        del body["max_tokens"]  # two names of one setting may not disagree
    if "input_ids" in body:
        del body["text_input"]
    status, reply = http_generate(llm_server.http_url, "llm", body)
    if spec.target == "stream":  # Triton's own rule: `generate` allows one response
        assert "exactly 1 response" in reply["error"], reply
        return
    assert status == 200, reply
    assert isinstance(reply["text_output"], list) is (spec.target == "n")


@pytest.mark.parametrize(("field", "value"), [("lora_name", "x"), ("lora_task_id", 3), ("lora_path", "x")])
def test_an_adapter_is_refused_by_a_model_without_them(llm_server: LlmServer, field: str, value: str | int) -> None:
    status, reply = http_generate(llm_server.http_url, "llm", {**PROMPT, "max_tokens": 4, field: value})
    assert status == 400 and field in reply["error"], reply


@pytest.mark.parametrize("spec", NEUTRAL, ids=name)
def test_a_tensor_that_is_not_served_is_taken_only_neutral(llm_server: LlmServer, spec: InputSpec) -> None:
    for value in spec.neutral:
        assert ask(llm_server, {spec.name: shaped(spec, [value])}) == ""
    if spec.dtype is DataType.BYTES:
        other: Any = "something"
    else:
        other = True if spec.dtype is DataType.BOOL else 3
    size = int(np.prod([dim if dim > 0 else 1 for dim in spec.dims]))
    refused = ask(llm_server, {spec.name: shaped(spec, [other] * size)})
    assert spec.name in refused


@pytest.mark.parametrize("spec", [s for s in GENERATE.outputs if not s.reason], ids=name)
def test_an_output_comes_as_declared(llm_server: LlmServer, spec: OutputSpec) -> None:
    inputs = {**PROMPT, "stream": True, **({spec.flag: True} if spec.flag else {})}
    answer = grpc_infer(
        llm_server.grpc_url,
        "llm",
        inputs,
        outputs=("text_output", spec.name),
        parameters={"max_tokens": 3, "ignore_eos": True},
    )
    assert answer.error == ""
    arrays = [response[spec.name] for response in answer.responses if spec.name in response]
    assert arrays, f"{spec.name} never came"
    for array in arrays:
        assert array.ndim == len(spec.dims)
        assert array.dtype == NUMPY[spec.dtype] or spec.dtype is DataType.BYTES


def len_of_vocabulary(server: LlmServer) -> int:
    """Size of the bias vector that preprocessing makes: one bias per token."""
    inputs = {"QUERY": "x", "EMBEDDING_BIAS_WORDS": ["return"], "EMBEDDING_BIAS_WEIGHTS": [1.0]}
    return len(grpc_infer(server.grpc_url, "preprocessing", inputs).responses[0]["EMBEDDING_BIAS"])
