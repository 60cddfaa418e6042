"""Every tensor of the contract, one test each: declared, read, refused with a reason, answered."""

from __future__ import annotations

from dataclasses import replace

import pytest
import toy_tokenizers
from slipstream.core.adapters import Matrix
from slipstream.core.config import EngineConfig, ServingConfig
from slipstream.core.errors import CapacityError, EngineError, RequestError, SlipstreamError
from slipstream.core.outputs import RequestOutput, TokenLogprobs
from slipstream.core.request import FinishReason
from slipstream.core.settings import BY_NAME
from slipstream.protocol import wire
from slipstream.protocol.client_settings import read_settings
from slipstream.protocol.contract import GENERATE, OUTPUTS, TASKS, declarations
from slipstream.protocol.request_parser import parse_request, select_outputs
from slipstream.protocol.responses import ENCODERS, encode_gathered, encode_response, is_gathered
from slipstream.protocol.tensor_spec import InputSpec, OutputSpec, Use
from slipstream.tokenizer.tokenizer import TextTokenizer
from wire_requests import answers, request, tensor

TOKENIZER = TextTokenizer(toy_tokenizers.byte_level())
CONFIG = EngineConfig()
BATCHED = EngineConfig(serving=ServingConfig(max_batch_size=1))

# A value that each served input may have, and what it becomes ("=": itself).
SAMPLES: dict[str, tuple[object, object]] = {
    "prompt": ("hello", "="), "prompt_token_ids": ([5, 6, 7], (5, 6, 7)), "prompt_length": (2, "="),
    "sampling_parameters": ('{"top_k": 4}', None), "add_special_tokens": (False, "="), "max_tokens": (9, "="),
    "min_tokens": (2, "="), "end_id": (1, "="), "stop": (["a", "b"], ("a", "b")), "bad_words": (["x"], ("x",)),
    "stop_words_ids": ([5, 6, 7, 2, 3, -1], ((5, 6), (7,))), "bad_words_ids": ([5, 6, 7, 3, -1, -1], ((5, 6, 7),)),
    "allowed_token_ids": ([5, 6], (5, 6)),
    "truncate_prompt_tokens": (9, "="), "detokenize": (False, "="),
    "ignore_eos": (True, "="), "include_stop_str_in_output": (True, "="), "skip_special_tokens": (False, "="),
    "temperature": (0.5, "="), "top_k": (3, "="), "top_p": (0.5, "="), "min_p": (0.25, "="),
    "repetition_penalty": (1.5, "="), "presence_penalty": (0.5, "="), "frequency_penalty": (0.5, "="),
    "seed": (2**63 + 5, "="), "n": (2, "="), "best_of": (1, "="), "beam_width": (3, "="),
    "length_penalty": (0.5, "="), "early_stopping": (True, "="),
    "embedding_bias_words": (["fox"], ("fox",)),
    "embedding_bias_weights": ([1.5], (1.5,)), "embedding_bias": ([0.0, 2.0], (0.0, 2.0)),
    "guided_decoding_guide_type": ("regex", "="),
    "guided_decoding_guide": ("[a-z]+", "="), "stream": (True, "="), "stream_interval": (4, "="),
    "exclude_input_in_output": (True, "="), "stop_request": (False, "="), "priority": (-3, "="),
    "lora_name": ("sql", "="), "lora_path": ("folder", "="), "lora_task_id": (2**63, "="),
    "lora_weights": ([1.5, 2.0], Matrix("e", (1, 2), b"\0\x3e\0\x40")),
    "prompt_table": ([1.5, 2.0], Matrix("e", (1, 2), b"\0\x3e\0\x40")), "prompt_table_size": (2, "="),
    "lora_config": ([1, 0, 2], Matrix("i", (1, 3), bytes([1, *[0] * 7, 2, 0, 0, 0]))),
    "cache_salt": ("tenant", "="), "timeout_ms": (50, "="), "num_draft_tokens": (3, "="),
    "speculative_method": ("ngram", "="),
    "speculative_acceptance": ("exact", "="), "reference_text": ("a text", "="), "reference_ids": ([5, 6], (5, 6)),
}  # fmt: skip


def shaped(spec: InputSpec, values: object, batch: bool = False) -> wire.Tensor:
    flat = values if isinstance(values, list) else [values]
    shape = {(2, -1): (2, len(flat) // 2), (-1, -1): (1, len(flat)), (-1, 3): (1, 3)}.get(spec.dims, (len(flat),))
    return tensor(spec.name, flat, (1, *shape) if batch else shape)


SERVED = [spec for spec in GENERATE.inputs if spec.use is Use.SERVED]
NEUTRAL = [spec for spec in GENERATE.inputs if spec.use is Use.NEUTRAL_ONLY]


@pytest.mark.parametrize("batch", [False, True], ids=["vllm_shape", "trtllm_shape"])
@pytest.mark.parametrize("spec", SERVED, ids=lambda spec: spec.name)
def test_a_served_input_sets_its_target(spec: InputSpec, batch: bool) -> None:
    value, expected = (True, "=") if spec.target.startswith("return_") else SAMPLES[spec.target]
    settings = read_settings(request(shaped(spec, value, batch)), batch)
    if spec.target == "sampling_parameters":
        assert settings == {"top_k": 4}
    else:
        assert settings == {spec.target: value if expected == "=" else expected}


@pytest.mark.parametrize("spec", SERVED, ids=lambda spec: spec.name)
def test_a_served_input_of_wrong_type_or_shape_is_refused_by_name(spec: InputSpec) -> None:
    wrong = wire.DataType.FP64 if spec.dtype is not wire.DataType.FP64 else wire.DataType.INT8
    with pytest.raises(RequestError, match=f"^{spec.name}: .*{spec.dtype.name}"):
        read_settings(request(wire.Tensor(spec.name, int(wrong), (1,), b"\0" * 8)))
    if spec.dims == (1,):
        values = ["a", "b"] if spec.dtype is wire.DataType.BYTES else [0, 1]
        with pytest.raises(RequestError, match=f"^{spec.name}: .*one element"):
            read_settings(request(tensor(spec.name, values)))


@pytest.mark.parametrize("spec", [s for s in GENERATE.inputs if s.dtype is wire.DataType.BYTES], ids=lambda s: s.name)
def test_text_that_is_not_utf8_is_refused(spec: InputSpec) -> None:
    with pytest.raises(RequestError, match=f"^{spec.name}: not valid UTF-8"):
        read_settings(request(tensor(spec.name, b"ab\xff")))


@pytest.mark.parametrize("spec", NEUTRAL, ids=lambda spec: spec.name)
def test_an_unserved_input_takes_neutral_values_only_and_says_why(spec: InputSpec) -> None:
    for value in spec.neutral:
        assert read_settings(request(tensor(spec.name, value))) == {}
    other = {"BYTES": "something", "BOOL": True}.get(spec.dtype.name, 77)
    with pytest.raises(RequestError, match=f"^{spec.name}: .*accepted: .*because"):
        read_settings(request(tensor(spec.name, other)))
    if -1 in spec.dims:
        assert read_settings(request(tensor(spec.name, [], (0,) * len(spec.dims)))) == {}


def test_every_target_is_a_setting_and_has_a_sample() -> None:
    targets = {spec.target for spec in SERVED}
    assert targets <= set(BY_NAME)
    assert {target for target in targets if not target.startswith("return_")} == set(SAMPLES)


def answer(*names: str, config: EngineConfig = CONFIG, echo: bool = False) -> dict:
    tensors = [tensor("text_input", "The quick brown", (1, 1) if config is BATCHED else (1,))]
    tensors += [tensor("exclude_input_in_output", not echo, (1, 1) if config is BATCHED else (1,))]
    client = parse_request(request(*tensors, outputs=names), config, TOKENIZER)
    sequence = client.request
    sequence.num_new_blocks, sequence.num_reused_blocks = 3, 1
    sequence.num_drafted_tokens, sequence.num_accepted_tokens = 8, 6
    sequence.times.first_token_ns = 1234
    ids = TOKENIZER.encode(" fox", False)
    output = RequestOutput(
        sequence, client.echo_text + " fox", ids, [4, 5], FinishReason.STOP, "END", is_first=True, is_final=True
    )
    output.logprobs = [TokenLogprobs(token_id, -0.25, 1, [(token_id, -0.25), (9, -2.0)]) for token_id in ids]
    output.cumulative_logprob = -0.25 * len(ids)
    return answers(encode_response(client, output))


NUM = len(TOKENIZER.encode(" fox", False))
EXPECTED = {
    "text_output": [" fox"], "finish_reason": ["stop"], "stop_reason": ["END"], "cumulative_logprob": [-0.25 * NUM],
    "num_input_tokens": [len(TOKENIZER.encode("The quick brown"))], "num_output_tokens": [NUM],
    "output_ids": TOKENIZER.encode(" fox", False), "sequence_length": [NUM], "context_ids": [4, 5], "text_length": [4],
    "request_handle": [7], "cum_log_probs": [-0.25 * NUM], "output_log_probs": [-0.25] * NUM, "context_logits": [],
    "generation_logits": [], "batch_index": [0], "sequence_index": [0], "kv_cache_alloc_new_blocks": [3],
    "kv_cache_reused_blocks": [1], "kv_cache_alloc_total_blocks": [4], "kv_cache_reused_block": [1],
    "kv_cache_missed_block": [3], "kv_cache_hit_rate": [0.25], "arrival_time_ns": [0], "first_scheduled_time_ns": [0],
    "first_token_time_ns": [1234], "last_token_time_ns": [0], "acceptance_rate": [0.75],
    "total_accepted_draft_tokens": [6], "total_draft_tokens": [8], "prompt_logprobs": ["null"],
    "prompt_token_ids": TOKENIZER.encode("The quick brown"),
}  # fmt: skip


@pytest.mark.parametrize("spec", GENERATE.outputs, ids=lambda spec: spec.name)
def test_an_output_is_sent_as_declared_when_asked_for_by_name(spec: OutputSpec) -> None:
    """Alone and exactly, with the declared rank; a batch dimension in front when the model has one."""
    ((name, (shape, values)),) = answer(spec.name).items()
    assert name == spec.name and len(shape) == len(spec.dims)
    assert all(declared in (-1, size) for declared, size in zip(spec.dims, shape))
    if spec.name == "logprobs":
        assert values[0].startswith('[{"') and '"rank": 1' in values[0] and '"decoded_token"' in values[0]
    else:
        assert values == EXPECTED[spec.name]
    batched_shape, batched_values = answer(spec.name, config=BATCHED)[spec.name]
    assert batched_shape == (1, *shape) and batched_values == values


@pytest.mark.parametrize("spec", [s for s in GENERATE.outputs if s.flag], ids=lambda spec: spec.name)
def test_an_output_is_sent_when_its_flag_asks(spec: OutputSpec) -> None:
    every = tuple(output.name for output in GENERATE.outputs)
    assert spec.name not in select_outputs(every, frozenset())
    assert spec.name in select_outputs(every, frozenset({spec.flag}))
    assert spec.flag in {s.target for s in SERVED}


def test_sequences_of_one_response_are_stacked_in_their_order() -> None:
    names = (
        "text_output",
        "num_input_tokens",
        "num_output_tokens",
        "output_ids",
        "sequence_length",
        "output_log_probs",
    )
    tensors = (tensor("text_input", "fox"), tensor("num_return_sequences", 2))
    client = parse_request(request(*tensors, outputs=(*names, "generation_logits")), CONFIG, TOKENIZER)
    outputs = []
    for index, ids in ((1, [5, 6, 7]), (0, [8])):
        sequence = replace(client.request, sequence_index=index)
        logprobs = [TokenLogprobs(token_id, -0.5, 1) for token_id in ids]
        outputs.append(
            RequestOutput(sequence, f"text {index}", ids, finish_reason=FinishReason.STOP, logprobs=logprobs)
        )
    client.echo_text = ""
    assert is_gathered(client)
    assert answers(encode_gathered(client, outputs)) == {
        "text_output": ((2,), ["text 0", "text 1"]),
        "num_input_tokens": ((1,), [len(TOKENIZER.encode("fox"))]),
        "num_output_tokens": ((2,), [1, 3]),
        "output_ids": ((2, 3), [8, 0, 0, 5, 6, 7]),
        "sequence_length": ((2,), [1, 3]),
        "output_log_probs": ((2, 3), [-0.5, 0, 0, -0.5, -0.5, -0.5]),
        "generation_logits": ((0, 0, 0), []),
    }


def test_drafts_of_all_sequences_of_one_response_count() -> None:
    names = ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")
    tensors = (tensor("text_input", "fox"), tensor("num_return_sequences", 2))
    client = parse_request(request(*tensors, outputs=names), CONFIG, TOKENIZER)
    outputs = []
    for index, accepted, drafted in ((0, 1, 4), (1, 5, 8)):
        sequence = replace(client.request, sequence_index=index)
        sequence.num_accepted_tokens, sequence.num_drafted_tokens = accepted, drafted
        outputs.append(RequestOutput(sequence, "", [], finish_reason=FinishReason.STOP))
    assert answers(encode_gathered(client, outputs)) == dict(zip(names, [((1,), [0.5]), ((1,), [6]), ((1,), [12])]))
    assert answers(encode_response(client, outputs[0])) == dict(zip(names, [((1,), [0.25]), ((1,), [1]), ((1,), [4])]))


@pytest.mark.parametrize(
    ("config", "values", "outputs"),
    [
        (CONFIG, {"stream": True}, ("text_output",)),
        (CONFIG, {"num_return_sequences": 1}, ("text_output",)),
        (CONFIG, {}, ("output_ids", "context_ids")),
        (BATCHED, {}, ("text_output",)),
    ],
    ids=["streaming", "one", "ensemble", "batch dimension"],
)
def test_sequences_answer_apart(config: EngineConfig, values: dict, outputs: tuple[str, ...]) -> None:
    shape = (1, 1) if config is BATCHED else (1,)
    settings = {"text_input": "fox", "num_return_sequences": 2, **values}
    tensors = [tensor(name, value, shape) for name, value in settings.items()]
    assert not is_gathered(parse_request(request(*tensors, outputs=outputs), config, TOKENIZER))


def test_an_echoed_prompt_is_in_text_and_ids_but_not_in_the_counts() -> None:
    sent = answer("text_output", "output_ids", "sequence_length", "num_output_tokens", "text_length", echo=True)
    assert sent["text_output"][1] == ["The quick brown fox"] and sent["text_length"][1] == [19]
    ids = TOKENIZER.encode("The quick brown fox")
    assert TOKENIZER.decode(sent["output_ids"][1]) == "The quick brown fox" and sent["sequence_length"][1] == [len(ids)]
    assert sent["num_output_tokens"][1] == [NUM]


def test_every_output_has_an_encoder_and_its_place_on_the_wire() -> None:
    assert set(ENCODERS) == {spec.name for spec in GENERATE.outputs} and len(GENERATE.outputs) < 256
    for task, contract in TASKS.items():
        assert [(o.name, o.dtype) for o in OUTPUTS[task]] == [(o.name, o.dtype) for o in contract.outputs]


def test_declarations_are_a_config_that_triton_parses() -> None:
    json_format = pytest.importorskip("google.protobuf.json_format")
    model_config_pb2 = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    for task, entry in declarations().items():
        config = {key: entry[key] for key in ("input", "output", "max_batch_size")}
        config["model_transaction_policy"] = {"decoupled": entry["decoupled"]}
        parsed = json_format.ParseDict(config, model_config_pb2.ModelConfig())
        assert len(parsed.input) == len(TASKS[task].inputs) and parsed.max_batch_size == 0
        assert parsed.model_transaction_policy.decoupled is (task == "generate")
        for side in (parsed.input, parsed.output):
            names = [entry.name for entry in side]
            assert len(names) == len(set(names)) and all(entry.dims for entry in side)


def test_names_of_the_contracts_it_replaces_are_all_there() -> None:
    """What the OpenAI frontend of Triton and clients of the replaced backends always send."""
    inputs = {spec.name: spec for spec in GENERATE.inputs}
    vllm = "text_input image stream sampling_parameters exclude_input_in_output return_finish_reason"
    vllm += " return_cumulative_logprob return_logprobs return_num_input_tokens return_num_output_tokens"
    openai = "text_input stream max_tokens stop_words top_p frequency_penalty presence_penalty temperature seed"
    openai += " guided_decoding_guide_type guided_decoding_guide lora_name"
    core = "input_ids input_lengths request_output_len end_id pad_id runtime_top_k runtime_top_p len_penalty streaming"
    for name in f"{vllm} {openai} {core}".split():
        assert inputs[name].is_optional
    assert not any(not spec.is_optional for spec in GENERATE.inputs)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (RequestError, wire.ErrorCode.INVALID_ARG),
        (CapacityError, wire.ErrorCode.UNAVAILABLE),
        (EngineError, wire.ErrorCode.INTERNAL),
    ],
)
def test_an_error_has_the_code_of_whose_fault_it_is(fault: type[SlipstreamError], code: wire.ErrorCode) -> None:
    client = parse_request(request(tensor("text_input", "The quick brown", (1,))), CONFIG, TOKENIZER)
    failed = RequestOutput(client.request, "", [], finish_reason=FinishReason.ERROR, error="it broke", fault=fault)
    assert encode_response(client, failed) == wire.error_response(client.handle, code, "it broke")
