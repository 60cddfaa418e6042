"""Numbers at and past every limit, in every place that takes one: a RequestError or values that the engine can hold."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterator

import pytest
import toy_tokenizers
from slipstream.core.config import EngineConfig
from slipstream.core.errors import RequestError
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.tokenize_tasks import DetokenizeTask, TokenizeTask
from slipstream.protocol import wire
from slipstream.protocol.client_settings import names
from slipstream.protocol.contract import DETOKENIZE, GENERATE, TOKENIZE
from slipstream.protocol.request_parser import parse_request
from slipstream.protocol.tensor_spec import InputSpec, TaskContract
from slipstream.tokenizer.tokenizer import TextTokenizer
from wire_requests import request, tensor

TOKENIZER = TextTokenizer(toy_tokenizers.sentencepiece())
TASKS = {
    "tokenize": TokenizeTask(EngineConfig(task="tokenize"), TOKENIZER),
    "detokenize": DetokenizeTask(EngineConfig(task="detokenize"), TOKENIZER),
}
INTEGERS = (0, 1, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**400)
FLOATS = (0.0, -0.0, 1.0, 1e-300, 1e-40, 1e300, -1e300, math.inf, -math.inf, math.nan, 0.5, 1.5)
ODD = (True, False, "1e9", "1099511627776", "nan", "inf", "", "9" * 5000, [], {}, [[]])
RANGES = {"INT32": (-(2**31), 2**31 - 1), "UINT64": (0, 2**64 - 1), "UINT8": (0, 255)}


def check_held(made: Request) -> None:
    """Everything in the type that the engine's tensors have."""
    params = made.params
    ids = [*params.stop_token_ids, *(token_id for token_id, _ in params.logit_bias)]
    ids += [token_id for word in (*params.bad_words_ids, *params.stop_words_ids) for token_id in word]
    struct.pack(f"<{len(ids)}i", *ids)
    struct.pack(f"<{len(made.prompt_token_ids)}i", *made.prompt_token_ids)
    assert all(token_id >= 0 for token_id in ids)
    end_id = -1 if params.end_id is None else params.end_id
    struct.pack("<6i", params.max_tokens, params.min_tokens, params.top_k, params.n, end_id, made.priority)
    struct.pack("<q", ((params.seed or 0) + 2**63) % 2**64 - 2**63)
    floats = [params.temperature, params.top_p, params.min_p, params.repetition_penalty]
    floats += [params.presence_penalty, params.frequency_penalty, *(bias for _, bias in params.logit_bias)]
    floats += params.embedding_bias
    held = struct.unpack(f"<{len(floats)}f", struct.pack(f"<{len(floats)}f", *floats))
    assert all(map(math.isfinite, held))
    assert params.temperature == 0.0 or 1e3 / held[0] < 3e38, "logits / temperature overflow"
    assert made.deadline is None or math.isfinite(made.deadline)


def parse_or_refuse(*tensors: wire.Tensor, **kwargs) -> Request | None:
    try:
        client = parse_request(request(*tensors, **kwargs), EngineConfig(), TOKENIZER)
    except RequestError as error:
        assert wire.error_response(7, wire.ErrorCode.INVALID_ARG, str(error))
        return None
    if client.request is not None:
        check_held(client.request)
    return client.request


def _nested(value: object) -> Iterator[object]:
    yield from (value, [value], [value, value], {"5": value}, [[value], [1]], [[1], [value]])
    if isinstance(value, int | float):
        yield {str(value): 1.0}


@pytest.mark.parametrize("name", names(frozenset({"prompt", "sampling_parameters"})))
def test_any_number_in_any_json_field_or_request_parameter(name: str) -> None:
    for value in (*INTEGERS, *FLOATS, *ODD):
        for shaped in _nested(value):
            parse_or_refuse(tensor("text_input", "a"), tensor("sampling_parameters", json.dumps({name: shaped})))
            parse_or_refuse(tensor("text_input", "a"), parameters={name: json.dumps(shaped)})
        if isinstance(value, int | float | str):
            parse_or_refuse(tensor("text_input", "a"), parameters={name: value})


def _extremes(spec: InputSpec) -> tuple[float, ...]:
    if spec.dtype.name in RANGES:
        low, high = RANGES[spec.dtype.name]
        return low, high, max(low, -1), 0, 1
    if spec.dtype.name == "BOOL":
        return True, False
    largest = 3.4e38 if spec.dtype.name == "FP32" else 6e4
    return 0.0, math.nan, math.inf, -math.inf, 1e-40, largest, -largest


def _numeric(task: TaskContract) -> list[InputSpec]:
    return [spec for spec in task.inputs if spec.dtype is not wire.DataType.BYTES]


@pytest.mark.parametrize("spec", _numeric(GENERATE), ids=lambda spec: spec.name)
def test_any_number_in_any_tensor(spec: InputSpec) -> None:
    prompt = [] if spec.target == "prompt_token_ids" else [tensor("text_input", "a")]
    prompt = [tensor("input_ids", [5, 6])] if spec.target == "prompt_length" else prompt
    for value in _extremes(spec):
        for shape in ((1,), (2,), (2, 1), (1, 1), (0,)):
            given = tensor(spec.name, [value] * math.prod(shape), shape)
            extra = [tensor("embedding_bias_words", ["a"])] if spec.target == "embedding_bias_weights" else []
            parse_or_refuse(*prompt, given, *extra)


@pytest.mark.parametrize("task", [TOKENIZE, DETOKENIZE], ids=lambda task: task.task)
def test_any_number_in_any_tensor_of_the_stateless_tasks(task: TaskContract) -> None:
    for spec in _numeric(task):
        for value in _extremes(spec):
            tensors = {"QUERY": tensor("QUERY", "a", task=task)} if task is TOKENIZE else {}
            if task is DETOKENIZE:
                tensors["TOKENS_BATCH"] = tensor("TOKENS_BATCH", [5], (1, 1), task)
            if spec.target == "bias_weights":
                tensors["words"] = tensor("EMBEDDING_BIAS_WORDS", ["a", "a"], task=task)
            shape = (1, 1) if len(spec.dims) == 2 else (2,) if spec.target == "bias_weights" else (1,)
            tensors[spec.name] = tensor(spec.name, [value] * math.prod(shape), shape, task)
            with contextlib.suppress(RequestError):
                TASKS[task.task].answer(request(*tensors.values(), outputs=()))


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "n", "seed", "end_id", "logprobs", "temperature", "top_p"])
def test_in_process_too_a_wrong_type_is_a_request_error(name: str) -> None:
    for value in (True, "5", math.nan, math.inf, 10**5000, -(10**5000), [1]):
        with pytest.raises(RequestError, match=f"^{name}: got"):
            SamplingParams(**{name: value})


LISTS = ("stop", "bad_words", "stop_token_ids", "allowed_token_ids", "logprob_token_ids", "reference_ids")
LISTS += ("stop_words_ids", "bad_words_ids", "logit_bias", "embedding_bias")


@pytest.mark.parametrize("name", LISTS)
def test_in_process_too_a_list_of_another_type_is_a_request_error(name: str) -> None:
    of_no_list = (5, True, 1.5, b"x", [None], ["\ud800"], [[]], [b"x"], [object()], {"a": 1}, [("a", 1)], iter(["a"]))
    for value in of_no_list:
        with pytest.raises(RequestError, match=f"^{name}: (got|not valid UTF-8)"):
            SamplingParams(**{name: value})
    if name in ("stop", "bad_words"):
        for value in ([5], ["a", 5], [["a"]], (True,)):
            with pytest.raises(RequestError, match=rf"^{name}: got .*, accepted: a string or a list of strings"):
                SamplingParams(**{name: value})


def test_in_process_lists_may_be_of_several_types() -> None:
    for value in ([5], (5,), {5}, range(5, 6)):
        assert list(SamplingParams(stop_token_ids=value).stop_token_ids) == [5]
    assert SamplingParams(stop="a").stop == ("a",) and SamplingParams(stop=None).stop == ()
    assert SamplingParams(logit_bias={5: 1.0}) == SamplingParams(logit_bias=((5, 1.0),))


def test_top_k_past_int32_is_refused_with_the_limit() -> None:
    for value in (2**31, 2**40):
        with pytest.raises(RequestError, match=r"^top_k: got \d+, accepted: an integer from 1 to 2147483647, or 0"):
            SamplingParams(top_k=value)
    assert SamplingParams(top_k=2**31 - 1).top_k == 2**31 - 1


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
def test_a_choice_of_nothing_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(RequestError, match=rf"^{name}.choice: got \[\], accepted: a list of at least one text"):
        parse_request(
            request(tensor("text_input", "x"), tensor("sampling_parameters", json.dumps({name: {"choice": []}}))),
            EngineConfig(),
            TOKENIZER,
        )


@pytest.mark.parametrize("name", ["a" * 1_000_000, "\ud800" * 1_000_000], ids=["long", "no text"])
def test_a_name_of_any_length_is_told_in_few_words(name: str) -> None:
    text = tensor("text_input", "hi")
    in_json = request(text, tensor("sampling_parameters", json.dumps({name: 1})))
    as_parameter = request(text, parameters={name: 1})
    for sent in (in_json, as_parameter):
        with pytest.raises(RequestError) as caught:
            parse_request(sent, EngineConfig(), TOKENIZER)
        assert len(str(caught.value)) < 10_000 and len(caught.value.field) < 1000
