"""Wire request -> ClientRequest: order of precedence, what is refused and how, prompts, outputs, deadlines."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import pytest
import toy_tokenizers
from backend_wire import encode_request, payload_of
from slipstream.core.config import EngineConfig, ModelConfig, ServingConfig
from slipstream.core.errors import RequestError
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.protocol import wire
from slipstream.protocol.request_parser import STREAM_ECHO, ClientRequest, parse_request
from slipstream.tokenizer.tokenizer import TextTokenizer
from wire_requests import request, tensor

TOKENIZER = TextTokenizer(toy_tokenizers.sentencepiece())
CONFIG = EngineConfig()
PROMPT = tensor("text_input", "The quick brown")


def parse(*tensors: wire.Tensor, config: EngineConfig = CONFIG, **kwargs) -> ClientRequest:
    return parse_request(request(*tensors, **kwargs), config, TOKENIZER)


def params(*tensors: wire.Tensor, **kwargs) -> SamplingParams:
    client = parse(PROMPT, *tensors, **kwargs)
    assert client.request is not None
    return client.request.params


def sampling(**fields: object) -> wire.Tensor:
    return tensor("sampling_parameters", json.dumps(fields))


def test_tensor_beats_parameter_beats_json_beats_default() -> None:
    config = EngineConfig(serving=ServingConfig(default_max_tokens=11))
    by_json = sampling(max_tokens=22)
    assert params(config=config).max_tokens == 11
    assert params(by_json, config=config).max_tokens == 22
    assert params(by_json, parameters={"max_tokens": 33}, config=config).max_tokens == 33
    assert params(by_json, tensor("max_tokens", 44), parameters={"max_tokens": 33}, config=config).max_tokens == 44
    assert params(parameters={"sampling_parameters": '{"max_tokens": 55}'}).max_tokens == 55


def test_two_names_of_one_setting_must_agree_within_a_source() -> None:
    assert params(tensor("max_tokens", 5), tensor("request_output_len", 5)).max_tokens == 5
    with pytest.raises(RequestError, match=r"^request_output_len: .*max_tokens is the same setting"):
        params(tensor("max_tokens", 5), tensor("request_output_len", 6))


def test_vllm_sampling_parameters_as_numbers_or_strings() -> None:
    got = params(sampling(temperature="0.5", top_k="7", ignore_eos="true", seed="12", n=2, logit_bias={"5": "1.5"}))
    assert (got.temperature, got.top_k, got.ignore_eos, got.seed, got.n) == (0.5, 7, True, 12, 2)
    assert got.logit_bias == ((5, 1.5),)
    got = params(sampling(stop="END", stop_token_ids=[3, 4], bad_words=["no"], top_k=-1, min_p=0.1, max_tokens=None))
    assert (got.stop, got.stop_token_ids, got.bad_words) == (("END",), (3, 4), ("no",))
    assert (got.top_k, got.max_tokens) == (-1, 16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_token": 5}, "max_token: unknown sampling parameter; did you mean max_tokens"),
        ({"zzzz": 5}, "zzzz: unknown sampling parameter; accepted: .*temperature"),
        ({"temperature": "hot"}, "temperature: got 'hot', accepted: a number"),
        ({"temperature": -1}, "temperature: got -1.0, accepted: a number from 0"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"top_k": 1.5}, "top_k: got 1.5, accepted: an integer"),
        ({"top_k": True}, "top_k: got True, accepted: an integer"),
        ({"ignore_eos": "maybe"}, "ignore_eos: got 'maybe', accepted: true or false"),
        ({"stop": [1]}, "stop: got \\[1\\], accepted: a string or a list of strings"),
        ({"stop": [""]}, "stop: .*non-empty"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids: got 'x'"),
        ({"logit_bias": [1]}, "logit_bias: got"),
        ({"use_beam_search": 2}, "use_beam_search: got 2, accepted: true or false"),
        ({"beam_width": 65}, "beam_width: got 65, accepted: an integer from 0 to 64"),
        ({"beam_width": 4, "n": 5}, "n: got 5, accepted: at most beam_width=4"),
        ({"beam_width": 4, "stop": "x"}, "stop: got .*, accepted with beam search: \\(\\)"),
        ({"length_penalty": float("inf")}, "length_penalty: got inf"),
        ({"best_of": 3}, "best_of: got 3, accepted: n=1"),
        ({"text_input": "x"}, "text_input: unknown sampling parameter"),
        ({"max_tokens": 0}, "max_tokens: got 0, accepted: an integer from 1 to"),
        ({"min_tokens": 17}, "min_tokens: got 17, accepted: at most max_tokens=16"),
        ({"end_id": -2}, "end_id: got -2, accepted: a token id from 0 to 2147483647, or -1"),
        ({"stream_interval": 0}, "stream_interval: got 0"),
        ({"timeout_ms": -1}, "timeout_ms: got -1"),
        ({"embedding_bias_words": ["a"]}, "embedding_bias_weights: got \\[\\], accepted: one number per word"),
        ({"stop_words_list": [[5, 6], [3, -1]]}, "stop_words_list: got"),
    ],
)  # fmt: skip
def test_a_wrong_sampling_parameter_is_named_with_what_is_accepted(fields: dict, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        params(sampling(**fields))


def test_sampling_parameters_that_are_no_json_object() -> None:
    for text in ("{", "[1]", "5", "[" * 100000):
        with pytest.raises(RequestError, match=r"^sampling_parameters: got .*accepted: a JSON object"):
            params(tensor("sampling_parameters", text))


def test_unknown_tensor_and_unknown_request_parameter() -> None:
    with pytest.raises(RequestError, match=r"^text_inputs: unknown input tensor; did you mean text_input"):
        parse(wire.Tensor("text_inputs", 13, (1,), b"\0\0\0\0"))
    with pytest.raises(RequestError, match=r"^prompt: unknown input tensor; did you mean text_input"):
        parse(wire.Tensor("prompt", 13, (1,), b"\0\0\0\0"))
    with pytest.raises(RequestError, match=r"^temprature: unknown request parameter; did you mean temperature"):
        parse(PROMPT, parameters={"temprature": 1.0})
    config = EngineConfig(serving=ServingConfig(ignored_request_parameters="x-*, traceparent"))
    assert parse(PROMPT, parameters={"x-request-id": "1", "traceparent": "00"}, config=config).request is not None


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "bad_words", "logit_bias", "embedding_bias_words"])
def test_lists_have_an_end(name: str) -> None:
    def given(num: int) -> dict[str, object]:
        if name == "logit_bias":
            return {name: {str(token_id): 1.0 for token_id in range(num)}}
        if name == "stop_token_ids":
            return {name: list(range(num))}
        weights = {"embedding_bias_weights": [0.0] * num} if name == "embedding_bias_words" else {}
        return {name: [f"w{index}" for index in range(num)], **weights}

    assert params(sampling(**given(1024)))
    with pytest.raises(RequestError, match=f"^{name}: got 1025 entries, accepted: at most 1024"):
        params(sampling(**given(1025)))
    if name in ("stop", "bad_words"):
        with pytest.raises(
            RequestError, match=f"^{name}: got 16385 characters or token ids in all, accepted: at most 16384"
        ):
            params(sampling(**{name: ["a" * 16384, "b"]}))
    assert len(params(tensor("embedding_bias", [0.5] * 3000)).embedding_bias) == 3000


def test_values_that_would_hold_up_the_reading_thread_are_refused_by_size() -> None:
    size = (1 << 20) + 1
    with pytest.raises(RequestError, match=f"^embedding_bias: got {size} elements, accepted: at most {size - 1}"):
        parse(PROMPT, wire.Tensor("embedding_bias", int(wire.DataType.FP32), (size,), bytes(4 * size)))
    with pytest.raises(RequestError, match=f"^image_bytes_input: got {size} elements, .* because this is a text model"):
        parse(PROMPT, wire.Tensor("image_bytes_input", int(wire.DataType.UINT8), (1, 1, 1, size), bytes(size)))
    with pytest.raises(RequestError, match=r"^sampling_parameters: got \d+ characters, accepted: at most 2097152"):
        params(tensor("sampling_parameters", " " * (1 << 21) + "{}"))
    with pytest.raises(RequestError, match=r"^bad_words_list: got 16385 characters or token ids in all"):
        params(tensor("bad_words_list", [5] * 16385 + [16385] + [-1] * 16384, (2, 16385)))
    with pytest.raises(RequestError, match=r"^bad_words_list: got 65538 elements, accepted: at most 65536"):
        params(tensor("bad_words_list", [5] * 32769 + [-1] * 32769, (2, 32769)))
    many = wire.Tensor("stop_words", int(wire.DataType.BYTES), (1,), bytes(1 << 22))
    with pytest.raises(RequestError, match=r"^stop_words: got 2 strings, accepted: 1"):
        parse(PROMPT, many)
    with pytest.raises(RequestError, match=r"^stop_words: got 1048576 entries, accepted: at most 1024"):
        parse(PROMPT, wire.Tensor("stop_words", int(wire.DataType.BYTES), (1 << 20,), bytes(1 << 22)))


def test_text_that_is_not_utf8_is_the_clients_fault_wherever_it_stands() -> None:
    """Triton's HTTP server passes such bytes on; they must not look like a fault of the wire, which ends the engine."""
    for parameters, bad, message in [
        ({"stop": "QQ"}, b"QQ", "stop: not valid UTF-8"),
        ({"WW": "x"}, b"WW", r"\\udcff\\udcfe: not valid UTF-8"),
    ]:
        payload = payload_of(encode_request(request(PROMPT, parameters=parameters))).replace(bad, b"\xff\xfe")
        with pytest.raises(RequestError, match=f"^{message}") as refused:
            parse_request(wire.decode_request(payload), CONFIG, TOKENIZER)
        assert wire.error_response(7, wire.ErrorCode.INVALID_ARG, str(refused.value))
    payload = payload_of(encode_request(request(PROMPT, request_id="RR"))).replace(b"RR", b"\xff\xfe")
    assert parse_request(wire.decode_request(payload), CONFIG, TOKENIZER).request is not None
    for fields in ({"stop": ["\ud800"]}, {"guided_decoding": {"regex": "\ud800"}}, {"\ud800": 1}):
        with pytest.raises(RequestError) as refused:
            params(sampling(**fields))
        assert wire.error_response(7, wire.ErrorCode.INVALID_ARG, str(refused.value))


@pytest.mark.parametrize("char", ["a", "\u4f60"])
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(char: str) -> None:
    """Encoding 40 MB takes a minute, of the thread that reads all requests."""

    class Untouched(TextTokenizer):
        num_encoded = 0

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            self.num_encoded += 1
            return super().encode(text, add_special_tokens)

    tokenizer = Untouched(toy_tokenizers.sentencepiece())
    config = EngineConfig(model=ModelConfig(max_model_len=64))
    limit = 64 * tokenizer.max_token_bytes
    fitting = char * (limit // len(char.encode()))
    assert parse_request(request(tensor("text_input", fitting)), config, tokenizer).request is not None
    assert tokenizer.num_encoded == 1
    numbers = f"{len((fitting + char).encode())} bytes, accepted: at most {limit} .max_model_len=64 tokens"
    with pytest.raises(RequestError, match=f"^text_input: the prompt has {numbers}"):
        parse_request(request(tensor("text_input", fitting + char)), config, tokenizer)
    assert tokenizer.num_encoded == 1


def test_prompt_as_text_or_ids_but_one_of_them() -> None:
    assert parse(PROMPT).request.prompt_token_ids == TOKENIZER.encode("The quick brown")
    without = parse(PROMPT, tensor("add_special_tokens", False)).request
    assert without.prompt_token_ids == TOKENIZER.encode("The quick brown", False)
    assert parse(tensor("input_ids", [5, 6, 7])).request.prompt_token_ids == [5, 6, 7]
    assert parse(tensor("input_ids", [5, 6, 0]), tensor("input_lengths", 2)).request.prompt_token_ids == [5, 6]
    for tensors, message in [
        ((PROMPT, tensor("input_ids", [5])), "text_input: given together with input_ids"),
        ((), "text_input: missing, accepted: a prompt"),
        ((tensor("text_input", ""),), "text_input: the prompt is empty"),
        ((tensor("input_ids", []),), "input_ids: the prompt is empty"),
        ((tensor("input_ids", [5, -1]),), "input_ids: got"),
        ((tensor("input_ids", [5]), tensor("input_lengths", 2)), "input_lengths: got 2"),
    ]:
        with pytest.raises(RequestError, match=f"^{message}"):
            parse(*tensors)


def test_a_batch_is_one_prompt() -> None:
    batched = EngineConfig(serving=ServingConfig(max_batch_size=1))
    client = parse(tensor("text_input", "hi", (1, 1)), tensor("stop_words", ["a", ""], (1, 2)), config=batched)
    assert client.has_batch_dim and not client.is_text_only and client.request.params.stop == ("a",)
    with pytest.raises(RequestError, match=r"^text_input: got shape \[2, 1\], accepted: a batch of 1"):
        parse(tensor("text_input", ["a", "b"], (2, 1)), config=batched)
    assert parse(tensor("text_input", "hi", (1, 1))).request is not None  # one element of any rank


def test_echo_follows_the_vllm_backend() -> None:
    excluded = ServingConfig(exclude_input_in_output=True)
    stream = tensor("stream", True)
    assert parse(PROMPT).echo_text == "The quick brown"
    assert parse(PROMPT, stream).echo_text == ""
    assert parse(PROMPT, tensor("exclude_input_in_output", True)).echo_text == ""
    assert parse(PROMPT, config=EngineConfig(serving=excluded)).echo_text == ""
    assert parse(PROMPT, tensor("exclude_input_in_output", False), config=EngineConfig(serving=excluded)).echo_text
    assert parse(tensor("input_ids", TOKENIZER.encode("The quick"))).echo_text == "The quick"
    with pytest.raises(RequestError) as refused:
        parse(PROMPT, stream, tensor("exclude_input_in_output", False))
    assert STREAM_ECHO in str(refused.value)


def test_outputs_by_name_or_by_flag() -> None:
    assert parse(PROMPT).outputs == ("text_output",) and parse(PROMPT).is_text_only
    by_flag = parse(PROMPT, tensor("return_finish_reason", True), tensor("return_num_output_tokens", True))
    assert by_flag.outputs == ("text_output", "finish_reason", "num_output_tokens") and not by_flag.is_text_only
    by_name = parse(PROMPT, tensor("return_finish_reason", True), outputs=("output_ids", "context_ids"))
    assert by_name.outputs == ("output_ids", "context_ids") and by_name.wants_context
    with pytest.raises(RequestError, match=r"^text_outputs: unknown output; did you mean text_output"):
        parse(PROMPT, outputs=("text_outputs",))


def test_outputs_that_need_logprobs_turn_them_on() -> None:
    assert params().logprobs is None
    for flag in ("return_logprobs", "return_log_probs", "return_cumulative_logprob"):
        assert params(tensor(flag, True)).logprobs == 0
    assert params(tensor("return_logprobs", True), sampling(logprobs=3)).logprobs == 3
    assert params(tensor("return_prompt_logprobs", True)).prompt_logprobs == 0


def test_who_sends_ids_gets_ids_unless_outputs_are_named() -> None:
    ids = tensor("input_ids", [5, 6])
    assert parse(ids).outputs == ("text_output", "output_ids", "sequence_length")
    assert parse(ids, outputs=("text_output",)).outputs == ("text_output",)


def test_a_step_of_an_ensemble_computes_logprobs_when_a_flag_asks() -> None:
    named = ("output_ids", "request_handle", "cum_log_probs", "output_log_probs")
    assert params(outputs=named).logprobs is None and params(outputs=named[2:]).logprobs == 0
    for flag in ("return_log_probs", "return_cumulative_logprob"):
        assert params(tensor(flag, True), outputs=named).logprobs == 0
        assert params(tensor(flag, False), outputs=named).logprobs is None
    assert params(outputs=("text_output", *named)).logprobs == 0  # a client's own request: a step takes no text


def test_the_default_temperature_is_for_requests_that_say_nothing_of_sampling() -> None:
    greedy = EngineConfig(serving=ServingConfig(default_temperature=0.0))
    assert params(config=greedy).is_greedy and not params().is_greedy
    for asked in ({"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.9}):
        got = params(sampling(**asked), config=greedy)
        assert got.temperature == asked.get("temperature", 1.0)


def test_a_model_that_is_not_decoupled_gives_one_response() -> None:
    plain = EngineConfig(serving=ServingConfig(is_decoupled=False))
    assert params(sampling(n=2), config=plain).n == 2  # gathered
    with pytest.raises(RequestError, match=r"^stream: got True, accepted: False, because .*decoupled: false"):
        parse(PROMPT, tensor("stream", True), config=plain)
    batched = EngineConfig(serving=ServingConfig(is_decoupled=False, max_batch_size=1))
    with pytest.raises(RequestError, match=r"^num_return_sequences: got 2, accepted: 1, because"):
        parse(replace(PROMPT, shape=(1, 1)), parameters={"n": 2}, config=batched)


def test_tensorrt_llm_top_p_zero_is_off_and_greedy_without_top_k() -> None:
    got = params(tensor("runtime_top_p", 0.0), tensor("temperature", 0.8))
    assert (got.top_p, got.is_greedy) == (1.0, True)
    got = params(tensor("runtime_top_p", 0.0), tensor("runtime_top_k", 5), tensor("temperature", 0.5))
    assert (got.top_p, got.top_k, got.temperature) == (1.0, 5, 0.5)


def test_bias_words_and_dense_bias_add_up() -> None:
    (token_id,) = TOKENIZER.encode("a", False)[-1:]
    dense = [0.0] * (token_id + 1)
    dense[token_id] = 0.5
    words = tensor("embedding_bias_words", ["a"]), tensor("embedding_bias_weights", [1.0])
    got = params(tensor("embedding_bias", dense), *words, sampling(logit_bias={str(token_id): 2}))
    assert dict(got.logit_bias)[token_id] == pytest.approx(3.0)
    assert got.embedding_bias == tuple(dense), "added to the logits beside the others"
    assert params(tensor("embedding_bias", [0.0] * 9)).embedding_bias == ()
    for bad in (math.nan, 101.0, -math.inf):
        with pytest.raises(RequestError, match=r"^embedding_bias: got .*accepted: biases from -100 to 100"):
            params(tensor("embedding_bias", [0.5, bad, 0.5]))


def test_guides_of_both_kinds() -> None:
    words = tensor("guided_decoding_guide_type", "regex"), tensor("guided_decoding_guide", "a+")
    assert params(*words).guide == Guide("regex", "a+")
    assert params(sampling(guided_decoding={"json": {"type": "object"}})).guide == Guide(
        "json_schema", '{"type": "object"}'
    )
    any_object = Guide("json_schema", '{"type": "object", "additionalProperties": true}')  # no list, no number
    assert params(sampling(guided_decoding={"json_object": True, "regex": None})).guide == any_object
    assert params(sampling(guided_decoding={"choice": ["a.b", "c"]})).guide == Guide("regex", r"(a\.b)|(c)")
    assert params(sampling(structured_outputs={"grammar": "root ::= x"})).guide == Guide("ebnf_grammar", "root ::= x")
    for fields, message in [
        ({"guided_decoding": {"yaml": "x"}}, "guided_decoding: got"),
        ({"guided_decoding": {"json": "{}", "regex": "a"}}, "guided_decoding: got"),
        ({"guided_decoding_guide": "a+"}, "guided_decoding_guide_type: missing"),
        ({"guided_decoding_guide_type": "xml"}, "guided_decoding_guide_type: got 'xml', accepted: json"),
    ]:
        with pytest.raises(RequestError, match=f"^{message}"):
            params(sampling(**fields))


def test_stop_is_a_stop_request_as_truth_value_and_a_stop_string_as_text() -> None:
    may_stop = {"config": replace(CONFIG, serving=ServingConfig(stop_by_request_id=True)), "request_id": "abc"}
    client = parse(tensor("stop", True), **may_stop)
    assert client.is_stop and client.request is None and client.request_id == "abc"
    assert client.outputs == ("text_output",)
    assert parse(tensor("stop", True), **may_stop, outputs=("output_ids", "sequence_length")).outputs == ()
    assert parse(parameters={"stop": True}, **may_stop).is_stop
    assert parse(parameters={"stop": True, "id": "abc"}, **{**may_stop, "request_id": ""}).request_id == "abc"
    assert parse(PROMPT, parameters={"request_id": "abc"}).request.request_id == "abc"
    assert params(parameters={"stop": "END"}).stop == ("END",)
    assert params(tensor("stop", False), tensor("stop_words", ["END"])).stop == ("END",)
    with pytest.raises(RequestError, match=r"^stop: needs a request id"):
        parse(tensor("stop", True), **{**may_stop, "request_id": ""})
    with pytest.raises(RequestError, match=r"^stop: got True, accepted: False .*stop_by_request_id"):
        parse(tensor("stop", True), request_id="abc")


def test_the_earlier_timeout_counts_from_arrival() -> None:
    assert parse(PROMPT).request.deadline is None

    def seconds_left(*arguments: object, **options: object) -> float:
        return parse(*arguments, **options).request.deadline - time.monotonic()  # type: ignore[arg-type]

    # a slow machine takes time to come here; limits that are wrong by a unit are off by a factor of 1000
    assert 400 < seconds_left(PROMPT, timeout_us=500_000_000) <= 500
    assert 400 < seconds_left(PROMPT, parameters={"timeout": 500_000_000}) <= 500
    passed = {"arrival_ns": time.time_ns() - 100 * 10**9}
    assert 0 < seconds_left(PROMPT, tensor("timeout_ms", 200_000), timeout_us=500_000_000, **passed) <= 100.5
    assert 200.5 < seconds_left(PROMPT, tensor("timeout_ms", 600_000), timeout_us=500_000_000, **passed) <= 400.5


def test_a_cache_salt_parts_cached_prefixes_and_has_an_end() -> None:
    assert parse(PROMPT).request.prefix_key == b"" == parse(PROMPT, tensor("cache_salt", "")).request.prefix_key
    salted = [parse(PROMPT, tensor("cache_salt", "é" * 128)), parse(PROMPT, parameters={"cache_salt": "é" * 128})]
    salted.append(parse(PROMPT, sampling(cache_salt="é" * 128)))
    assert len({client.request.prefix_key for client in salted} - {"é".encode() * 128}) == 1, "a key, not the salt"
    with pytest.raises(RequestError, match="cache_salt: got 258 bytes, accepted: at most 256"):
        parse(PROMPT, tensor("cache_salt", "é" * 129))


def test_the_rest_of_a_request_arrives() -> None:
    tensors = tensor("priority", -2), tensor("stream", True), tensor("stream_interval", 5)
    client = parse(PROMPT, *tensors, request_id="r1", arrival_ns=77)
    assert (client.handle, client.request_id, client.stream, client.stream_interval) == (7, "r1", True, 5)
    sequence = client.request
    assert (sequence.handle, sequence.request_id, sequence.priority) == (7, "r1", -2)
    assert sequence.times.arrival_ns == 77
    config = replace(CONFIG, serving=ServingConfig(stream_interval=4))
    assert parse(PROMPT, config=config).stream_interval == 4


def test_what_one_response_gathers_is_bounded() -> None:
    serving = ServingConfig(max_response_entries=500, stream_interval=4)
    tight = replace(CONFIG, model=ModelConfig(max_model_len=100), serving=serving)
    num_prompt = len(TOKENIZER.encode("The quick brown"))
    for fields, terms in [
        ({"n": 6, "max_tokens": 2**31 - 1}, f"n=6 x {100 - num_prompt} tokens x (1 + logprobs=0) = "),
        ({"max_tokens": 50, "logprobs": 10}, "n=1 x 50 tokens x (1 + logprobs=10) = 550 entries"),
        ({"max_tokens": 4, "prompt_logprobs": 20, "n": 128}, f"{num_prompt} prompt tokens x (1 + prompt_logprobs=20)"),
        ({"n": 6, "max_tokens": 90, "use_beam_search": True}, "n=6 x 90 tokens"),  # which answers at once, as it ends
    ]:
        given = tensor("exclude_input_in_output", True), tensor("stream", "use_beam_search" in fields)
        parse(PROMPT, sampling(**fields), *given, config=replace(tight, serving=ServingConfig()))
        with pytest.raises(RequestError, match=r"^max_tokens: one response .*max_response_entries=500") as refused:
            parse(PROMPT, sampling(**fields), *given, config=tight)
        assert terms in str(refused.value)
    parse(PROMPT, sampling(n=5, max_tokens=90, logprobs=20), tensor("stream", True), config=tight)
    with pytest.raises(RequestError, match="echoed tokens"):
        parse(PROMPT, sampling(n=100, max_tokens=4), config=tight)
