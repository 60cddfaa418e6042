"""Not only taken: tensors of `llm` whose effect can be seen do on the server what docs/contracts.md says."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from llm_client import Answer, grpc_infer
from llm_server import LlmServer
from slipstream.protocol.contract import GENERATE

PROMPT = "def fibonacci(n):\n"
NUM_TOKENS = 24
FLAGS = sorted({spec.flag for spec in GENERATE.outputs if spec.flag})


def ask(server: LlmServer, **inputs: Any) -> Answer:
    """One whole greedy response of 24 tokens at most, without the prompt; `inputs` add to that or say otherwise."""
    default = {"text_input": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0.0, "exclude_input_in_output": True}
    answer = grpc_infer(server.grpc_url, "llm", {**default, **inputs})
    assert not answer.error, answer.error
    return answer


def ids_of(server: LlmServer, **inputs: Any) -> list[int]:
    return ask(server, return_output_ids=True, **inputs).responses[0]["output_ids"][0].tolist()


@pytest.fixture(scope="module")
def greedy_ids(llm_server: LlmServer) -> list[int]:
    ids = ids_of(llm_server)
    assert len(ids) == NUM_TOKENS
    return ids


@pytest.fixture(scope="module")
def at(greedy_ids: list[int]) -> int:
    """Where a token comes for the first time, some way into the greedy text."""
    return next(index for index in range(5, NUM_TOKENS) if greedy_ids[index] not in greedy_ids[:index])


def word_ids(*words: list[int]) -> np.ndarray:
    """TensorRT-LLM's layout of word lists."""
    flat = [token_id for word in words for token_id in word]
    ends = np.cumsum([len(word) for word in words]).tolist()
    return np.array([flat, ends + [-1] * (len(flat) - len(ends))], np.int32)


# ---------------------------------------------------------------- where the output ends


@pytest.mark.parametrize("name", ["max_tokens", "request_output_len", "sampling_param_max_tokens"])
def test_the_number_of_tokens(llm_server: LlmServer, greedy_ids: list[int], name: str) -> None:
    inputs = {"text_input": PROMPT, "temperature": 0.0, "return_output_ids": True, "exclude_input_in_output": True}
    answer = grpc_infer(llm_server.grpc_url, "llm", {**inputs, name: 7})
    assert answer.responses[0]["output_ids"][0].tolist() == greedy_ids[:7]


def test_end_id_ends_the_output_and_is_not_shown(llm_server: LlmServer, greedy_ids: list[int], at: int) -> None:
    answer = ask(llm_server, end_id=greedy_ids[at], return_output_ids=True, return_finish_reason=True)
    assert answer.responses[0]["output_ids"][0].tolist() == greedy_ids[: at + 1]
    assert answer.last("finish_reason") == b"stop"
    assert answer.text == ask(llm_server, max_tokens=at).text
    assert ids_of(llm_server, end_id=greedy_ids[at], ignore_eos=True) == greedy_ids


def test_min_tokens_puts_the_end_off(llm_server: LlmServer, greedy_ids: list[int], at: int) -> None:
    ids = ids_of(llm_server, end_id=greedy_ids[at], min_tokens=at + 4)
    assert ids[:at] == greedy_ids[:at] and len(ids) >= at + 4


@pytest.mark.parametrize("name", ["stop_words", "sampling_param_stop"])
def test_stop_words(llm_server: LlmServer, name: str) -> None:
    text = ask(llm_server).text
    word = text[8:12]
    answer = ask(llm_server, **{name: [word, "zzzz"]}, return_stop_reason=True)
    assert (answer.text, answer.last("stop_reason")) == (text.partition(word)[0], word.encode())
    assert ask(llm_server, **{name: [word]}, include_stop_str_in_output=True).text == text.partition(word)[0] + word


def test_stop_words_by_token_ids(llm_server: LlmServer, greedy_ids: list[int], at: int) -> None:
    ids = ids_of(llm_server, stop_words_list=word_ids([9, 9], greedy_ids[at - 1 : at + 1]))
    assert ids == greedy_ids[: at + 1]
    sampling = json.dumps({"stop_token_ids": [greedy_ids[at]]})
    assert ids_of(llm_server, sampling_parameters=sampling) == greedy_ids[: at + 1]


# ---------------------------------------------------------------- which tokens


def test_bad_words(llm_server: LlmServer, greedy_ids: list[int], at: int) -> None:
    banned = ids_of(llm_server, bad_words_list=word_ids([greedy_ids[at]]))
    assert banned[:at] == greedy_ids[:at] and greedy_ids[at] not in banned
    tokens = {"TOKENS_BATCH": np.array([[greedy_ids[at]]], np.int32)}
    word = grpc_infer(llm_server.grpc_url, "postprocessing", tokens).responses[0]["OUTPUT"][0].decode()
    assert word
    assert ids_of(llm_server, bad_words=[word])[at] != greedy_ids[at]


def test_seed(llm_server: LlmServer) -> None:
    def sample(seed: int) -> str:
        return ask(llm_server, temperature=1.0, seed=np.array([seed], np.uint64)).text

    assert sample(2**63 + 5) == sample(2**63 + 5) != sample(6)


@pytest.mark.parametrize("temperature", ["temperature", "sampling_param_temperature"])
@pytest.mark.parametrize("name", ["top_k", "runtime_top_k", "sampling_param_top_k"])
def test_top_k_of_one_is_greedy(llm_server: LlmServer, greedy_ids: list[int], name: str, temperature: str) -> None:
    inputs = {"text_input": PROMPT, "max_tokens": NUM_TOKENS, "return_output_ids": True, "stream": True}
    answer = grpc_infer(llm_server.grpc_url, "llm", {**inputs, name: 1, temperature: 1.5})
    assert [i for response in answer.responses for i in response["output_ids"][0]] == greedy_ids


@pytest.mark.parametrize("name", ["top_p", "runtime_top_p", "sampling_param_top_p"])
def test_a_tiny_top_p_is_greedy(llm_server: LlmServer, greedy_ids: list[int], name: str) -> None:
    assert ids_of(llm_server, temperature=1.5, **{name: 1e-6}) == greedy_ids


def test_min_p_of_one_is_greedy(llm_server: LlmServer, greedy_ids: list[int]) -> None:
    assert ids_of(llm_server, temperature=1.5, min_p=1.0) == greedy_ids


@pytest.mark.parametrize(
    "name",
    [
        "presence_penalty",
        "sampling_param_presence_penalty",
        "frequency_penalty",
        "sampling_param_frequency_penalty",
        "repetition_penalty",
    ],
)
def test_penalties_and_rewards_for_what_was_said(llm_server: LlmServer, name: str) -> None:
    """A reward for tokens that came already makes the text circle; a penalty makes it go on to others."""
    values = (0.5, 2.0) if name == "repetition_penalty" else (-2.0, 2.0)
    long = {"max_tokens": 64, "ignore_eos": True}
    num_rewarded, num_penalised = (len(set(ids_of(llm_server, **long, **{name: value}))) for value in values)
    assert num_rewarded < num_penalised


def test_allowed_token_ids(llm_server: LlmServer, greedy_ids: list[int]) -> None:
    """As a tensor and as JSON: no other token is drawn, however hot."""
    allowed = sorted(set(greedy_ids))[:2]
    hot = {"temperature": 50.0, "seed": np.array([3], np.uint64), "ignore_eos": True}
    assert set(ids_of(llm_server, allowed_token_ids=np.array(allowed, np.int32), **hot)) == set(allowed)
    assert set(ids_of(llm_server, sampling_parameters=json.dumps({"allowed_token_ids": allowed}), **hot)) == set(
        allowed
    )


def test_biases(llm_server: LlmServer, greedy_ids: list[int]) -> None:
    """As JSON, as TensorRT-LLM's vector and as its words: a bias of 100 leaves nothing else."""
    token_id = greedy_ids[0] + 1
    assert ids_of(llm_server, sampling_parameters=json.dumps({"logit_bias": {token_id: 100}})) == [token_id] * 24
    words = {"QUERY": "x", "EMBEDDING_BIAS_WORDS": ["return"], "EMBEDDING_BIAS_WEIGHTS": [100.0]}
    vector = grpc_infer(llm_server.grpc_url, "preprocessing", words).responses[0]["EMBEDDING_BIAS"]
    [word_id] = np.flatnonzero(vector).tolist()
    assert ids_of(llm_server, embedding_bias=vector) == [word_id] * 24
    assert ids_of(llm_server, embedding_bias_words=["return"], embedding_bias_weights=[100.0]) == [word_id] * 24


# ---------------------------------------------------------------- what is sent


@pytest.mark.parametrize("name", ["exclude_input_in_output", "sampling_param_exclude_input_from_output"])
def test_the_prompt_precedes_the_output_unless_excluded(llm_server: LlmServer, name: str) -> None:
    inputs = {"text_input": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0.0}
    alone = ask(llm_server).text
    for given, text in (({}, PROMPT + alone), ({name: False}, PROMPT + alone), ({name: True}, alone)):
        assert grpc_infer(llm_server.grpc_url, "llm", {**inputs, **given}).text == text


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_brings_its_outputs_and_no_other(llm_server: LlmServer, flag: str) -> None:
    outputs = {spec.name for spec in GENERATE.outputs if spec.flag == flag}
    assert set(ask(llm_server, **{flag: True}, max_tokens=2).responses[0]) == {"text_output", *outputs}
    assert set(ask(llm_server, **{flag: False}, max_tokens=2).responses[0]) == {"text_output"}


def test_token_counts(llm_server: LlmServer, greedy_ids: list[int]) -> None:
    ids = grpc_infer(llm_server.grpc_url, "preprocessing", {"QUERY": PROMPT}).responses[0]["INPUT_ID"]
    answer = ask(llm_server, return_num_input_tokens=True, return_num_output_tokens=True)
    assert (answer.last("num_input_tokens"), answer.last("num_output_tokens")) == (len(ids), NUM_TOKENS)
    shorter = {"input_ids": ids, "input_lengths": len(ids) - 2, "max_tokens": 1, "return_num_input_tokens": True}
    assert grpc_infer(llm_server.grpc_url, "llm", shorter).last("num_input_tokens") == len(ids) - 2


def test_a_cache_salt_hides_what_others_have_asked(llm_server: LlmServer) -> None:
    """A right guess of another's prompt finds its blocks only with its salt, in whichever way the salt is given."""
    secret = "# the password of the vault is 7391\n" * 20

    def reused(salt: str, **inputs: Any) -> int:
        given = {"cache_salt": salt} if salt else {}
        answer = ask(llm_server, text_input=secret, max_tokens=1, return_perf_metrics=True, **given, **inputs)
        return answer.last("kv_cache_reused_blocks")

    assert reused("mine") == 0 < (num_blocks := reused("mine"))
    assert reused("guessed") == 0 and reused("") == 0, "neither with another salt nor without one"
    assert reused("", sampling_parameters='{"cache_salt": "mine"}') == num_blocks == reused("")
