"""core/request_memory.py: what a request keeps in host memory until it is answered, and the bound of all together."""

from __future__ import annotations

import gc
import json
import random
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import toy_tokenizers
from slipstream.core.config import EngineConfig, SchedulerConfig, ServingConfig, StructuredOutputConfig
from slipstream.core.errors import CapacityError, RequestError
from slipstream.core.finish import StopConditions
from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.logits_processors import ProcessorCall
from slipstream.core.outputs import TokenLogprobs
from slipstream.core.request import Request
from slipstream.core.request_memory import MAX_UNCOUNTED_BYTES, RequestMemory, bytes_by_field, logprob_bytes
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.engine.input_processor import InputProcessor
from slipstream.protocol.request_parser import parse_request
from slipstream.tokenizer.tokenizer import TextTokenizer
from wire_requests import request as wire_request
from wire_requests import tensor

LONG = 1 << 15  # tokens
VOCAB = 150_000
LIMIT = 10**6
OBJECT_BYTES = 2000  # that a sequence of one token takes: at most max_num_seqs and max_waiting_requests of them


def make_processor() -> InputProcessor:
    spec = SimpleNamespace(vocab_size=VOCAB, hidden_size=8, eos_token_ids=(0,))
    return InputProcessor(spec, TextTokenizer(toy_tokenizers.byte_level()), StructuredOutputConfig())  # type: ignore[arg-type]


def ids(count: int, seed: int = 1) -> list[int]:
    """Each an object of its own, as a tokenizer or tensor brings them: Python shares those up to 256."""
    dice = random.Random(seed)
    return [dice.randrange(300, VOCAB) for _ in range(count)]


def biases(count: int = LONG) -> tuple[float, ...]:
    dice = random.Random(1)
    return tuple(dice.uniform(-9, 9) for _ in range(count))


def words(count: int, length: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(ids(length, seed)) for seed in range(count))


def texts(count: int, length: int, first: int) -> tuple[str, ...]:
    dice = random.Random(2)
    return tuple("".join(chr(first + dice.randrange(50)) for _ in range(length)) for _ in range(count))


def arguments() -> ProcessorCall:
    return ProcessorCall("x", {"a": [[0] for _ in range(3000)]})


def kept_bytes(make: Callable[[], Request]) -> tuple[int, list[Request]]:
    """What Python has allocated for the sequences of a request, once the engine has it."""
    processor, cache = make_processor(), KVCacheManager(4, 64)
    processor.prepare(Request([5], SamplingParams(bad_words=("first",))))  # what is made once for all
    gc.collect()
    tracemalloc.start()
    try:
        sequences = processor.prepare(make())
        for sequence in sequences:
            sequence.stop_conditions = StopConditions(sequence, 2 * LONG)
        cache.hash_prompt(sequences)
        gc.collect()
        return tracemalloc.get_traced_memory()[0], sequences
    finally:
        tracemalloc.stop()


def test_long_lists_take_4_bytes_an_entry() -> None:
    num_bytes, [request] = kept_bytes(lambda: Request([5], SamplingParams(reference_ids=tuple(ids(LONG)))))
    assert num_bytes < 4 * LONG + 8192  # the rest of the request, and what a first one fills caches with
    assert list(request.params.reference_ids) == ids(LONG)
    num_bytes, [request] = kept_bytes(lambda: Request([5], SamplingParams(embedding_bias=biases())))
    assert num_bytes < 4 * LONG + 8192  # the rest of the request, and what a first one fills caches with
    assert max(abs(kept - bias) for kept, bias in zip(request.params.embedding_bias, biases())) < 1e-6
    assert make_processor().prepare(request)[0].params is request.params, "a request that is submitted again"


MADE: dict[str, tuple[str, Callable[[], Request]]] = {
    "prompt": ("prompt", lambda: Request(ids(LONG), SamplingParams())),
    "short prompt": ("prompt", lambda: Request(ids(1400), SamplingParams())),
    "sequences": ("prompt", lambda: Request(ids(LONG), SamplingParams(n=16))),
    "reference": ("reference_ids", lambda: Request([5], SamplingParams(reference_ids=tuple(ids(LONG))))),
    "biases": ("embedding_bias", lambda: Request([5], SamplingParams(embedding_bias=biases()))),
    "stop words": ("stop_words_ids", lambda: Request([5], SamplingParams(stop_words_ids=words(1024, 16)))),
    "long stop word": ("stop_words_ids", lambda: Request([5], SamplingParams(stop_words_ids=words(1, 16_384)))),
    "bad words": ("bad_words_ids", lambda: Request([5], SamplingParams(bad_words_ids=words(1024, 16)))),
    "pairs of bad words": ("bad_words_ids", lambda: Request([5], SamplingParams(bad_words_ids=words(1024, 2)))),
    "stop strings": ("stop", lambda: Request([5], SamplingParams(stop=texts(1024, 16, 97)))),
    "stop strings of emoji": ("stop", lambda: Request([5], SamplingParams(stop=texts(1024, 16, 0x1F600)))),
    "stop ids": ("stop_token_ids", lambda: Request([5], SamplingParams(stop_token_ids=tuple(ids(1024)), n=16))),
    "allowed ids": ("allowed_token_ids", lambda: Request([5], SamplingParams(allowed_token_ids=tuple(ids(1024))))),
    "some biases": ("logit_bias", lambda: Request([5], SamplingParams(logit_bias=(*zip(ids(1024), biases(1024)),)))),
    "grammar": ("guided_decoding_guide", lambda: Request([5], SamplingParams(guide=Guide("regex", "a" * 16_000)))),
    "arguments": ("logits_processors", lambda: Request([5], SamplingParams(logits_processors=(arguments(),)))),
}  # fmt: skip


def test_a_short_sequence_is_small() -> None:
    kept, sequences = kept_bytes(lambda: Request([5], SamplingParams(n=10)))
    assert 0.5 * OBJECT_BYTES <= kept / len(sequences) <= OBJECT_BYTES


@pytest.mark.parametrize("name", MADE)
def test_a_request_is_measured_by_what_it_keeps(name: str) -> None:
    field, make = MADE[name]
    kept, sequences = kept_bytes(make)
    request = sequences[0]
    assert request.num_bytes == sum(bytes_by_field(request).values())
    assert max(bytes_by_field(request).items(), key=lambda item: item[1])[0] == field
    kept -= OBJECT_BYTES * len(sequences)
    assert 0.7 * kept <= request.num_bytes <= 1.5 * kept


@pytest.mark.parametrize("num_alternatives", [0, 1, 5, 20, 100])
def test_log_probabilities_are_counted_by_what_they_take(num_alternatives: int) -> None:
    dice = random.Random(3)

    def an_entry() -> TokenLogprobs:
        top = [(dice.randrange(300, VOCAB), -dice.random()) for _ in range(num_alternatives)]
        return TokenLogprobs(dice.randrange(300, VOCAB), -dice.random(), 300, top)

    gc.collect()
    tracemalloc.start()
    try:
        entries = [an_entry() for _ in range(2000)]
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.7 * kept <= logprob_bytes(len(entries), num_alternatives) <= 1.5 * kept


def test_log_probabilities_of_a_response_are_counted() -> None:
    """A stream holds those between two responses; a beam search holds all until its end."""
    config = EngineConfig(serving=ServingConfig(stream_interval=4))
    tokenizer = TextTokenizer(toy_tokenizers.sentencepiece())
    num_prompt = len(tokenizer.encode("The quick brown"))

    def counted(stream: bool, **fields: object) -> tuple[int, int]:
        given = tensor("text_input", "The quick brown"), tensor("sampling_parameters", json.dumps(fields))
        made = parse_request(wire_request(*given, tensor("stream", stream)), config, tokenizer).request
        assert made is not None
        return made.num_logprob_bytes, made.num_prompt_logprob_bytes

    assert counted(False, max_tokens=50) == counted(True, max_tokens=50) == (0, 0)
    assert counted(False, max_tokens=50, logprobs=3, n=2) == (logprob_bytes(100, 3), 0)
    assert counted(True, max_tokens=50, logprobs=3, n=2) == (logprob_bytes(8, 3), 0)
    assert counted(True, max_tokens=50, logprobs=0, use_beam_search=True, n=2)[0] == logprob_bytes(100, 0)
    assert counted(True, max_tokens=1, prompt_logprobs=5) == (0, logprob_bytes(num_prompt, 5))


def test_what_an_answer_gathers_is_counted_with_its_request() -> None:
    of_tokens, of_prompt = logprob_bytes(300, 5), logprob_bytes(900, 20)
    made = Request([5], SamplingParams(), num_logprob_bytes=of_tokens, num_prompt_logprob_bytes=of_prompt)
    [request] = make_processor().prepare(made)
    assert request.num_bytes == 48 + of_tokens + of_prompt
    memory = RequestMemory(LIMIT)
    with pytest.raises(RequestError, match=rf"^prompt_logprobs: has {of_prompt} bytes in memory"):
        memory.take(request)


def a_request(handle: int, num_bytes: int, **params: Any) -> Request:
    request = Request(ids(10), SamplingParams(**params), handle=handle)
    request.num_bytes = num_bytes
    return request


def test_requests_are_refused_above_the_bound_and_counted_until_given_back() -> None:
    memory = RequestMemory(LIMIT)
    memory.take(a_request(1, 700_000))
    told = (
        r"^700000 bytes of 1 requests are in memory, this has 300001 more, 480 of them for its prompt; "
        r"max_total_request_bytes=1000000$"
    )
    with pytest.raises(CapacityError, match=told):
        memory.take(a_request(2, 300_001))
    assert memory.num_bytes == 700_000
    memory.take(a_request(3, 300_000))
    memory.give(2)  # it has taken nothing
    assert memory.num_bytes == LIMIT
    memory.give(1)
    memory.give(1)
    assert memory.num_bytes == 300_000
    memory.take(a_request(2, 300_001))


def test_small_requests_come_in_however_full_it_is() -> None:
    memory = RequestMemory(LIMIT)
    memory.take(a_request(1, LIMIT))
    for handle in range(2, 100):
        memory.take(a_request(handle, MAX_UNCOUNTED_BYTES))
    assert memory.num_bytes == LIMIT
    with pytest.raises(CapacityError):
        memory.take(a_request(100, MAX_UNCOUNTED_BYTES + 1))


def test_a_request_that_alone_is_too_large_names_its_largest_field() -> None:
    memory = RequestMemory(LIMIT)
    [request] = make_processor().prepare(Request(ids(20_000), SamplingParams()))
    memory.take(request)
    memory.give(request.handle)
    [request] = make_processor().prepare(Request(ids(20_000), SamplingParams(embedding_bias=biases())))
    told = r"has 960000 bytes in memory, the request 1091072; accepted: at most max_total_request_bytes=1000000 for all"
    with pytest.raises(RequestError, match=told) as caught:
        memory.take(request)
    assert caught.value.field == "prompt" and memory.num_bytes == 0
    wide, *others = make_processor().prepare(Request(ids(1000), SamplingParams(n=128)))
    assert wide.num_bytes == 1000 * (40 + 128 * 8) and not any(other.num_bytes for other in others)
    with pytest.raises(RequestError, match=r"^prompt: has 1064000 bytes"):
        memory.take(wide)


def test_the_beams_of_a_search_have_lists_of_their_own() -> None:
    [request] = make_processor().prepare(Request(ids(1000), SamplingParams(beam_width=10, n=2)))
    assert request.num_bytes == 1000 * (40 + 8 + 10 * 16)


@pytest.mark.parametrize("num_tokens", [8192, 32_768])
def test_by_default_a_full_queue_and_batch_of_ordinary_requests_fit(num_tokens: int) -> None:
    memory = RequestMemory(ServingConfig().max_total_request_bytes)
    [request] = make_processor().prepare(Request(ids(num_tokens), SamplingParams()))
    for handle in range(SchedulerConfig().max_num_seqs + SchedulerConfig().max_waiting_requests):
        request.handle = handle
        memory.take(request)
    assert memory.num_bytes == 1280 * 48 * num_tokens
