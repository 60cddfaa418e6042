"""What a request keeps in host memory until it is answered."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace

import toy_tokenizers
from slipstream.core.config import StructuredOutputConfig
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.input_processor import InputProcessor
from slipstream.tokenizer.tokenizer import TextTokenizer

LONG = 1 << 17  # tokens
VOCAB = 150_000


def make_processor() -> InputProcessor:
    spec = SimpleNamespace(vocab_size=VOCAB, hidden_size=8, eos_token_ids=(0,))
    return InputProcessor(spec, TextTokenizer(toy_tokenizers.byte_level()), StructuredOutputConfig())  # type: ignore[arg-type]


def ids(count: int, seed: int = 1) -> list[int]:
    """Each an object of its own, as a tokenizer or tensor brings them: Python shares those up to 256."""
    dice = random.Random(seed)
    return [dice.randrange(300, VOCAB) for _ in range(count)]


def kept_bytes(make: Callable[[], Request]) -> tuple[int, list[Request]]:
    """What Python has allocated for the sequences of a request, once the engine has it."""
    processor = make_processor()
    processor.prepare(Request([5], SamplingParams(bad_words=("first",))))  # what is made once for all
    gc.collect()
    tracemalloc.start()
    try:
        sequences = processor.prepare(make())
        gc.collect()
        return tracemalloc.get_traced_memory()[0], sequences
    finally:
        tracemalloc.stop()


def biases() -> tuple[float, ...]:
    dice = random.Random(1)
    return tuple(dice.uniform(-9, 9) for _ in range(LONG))


def test_long_lists_take_4_bytes_an_entry() -> None:
    num_bytes, [request] = kept_bytes(lambda: Request([5], SamplingParams(reference_ids=tuple(ids(LONG)))))
    assert num_bytes < 4.1 * LONG
    assert list(request.params.reference_ids) == ids(LONG)
    num_bytes, [request] = kept_bytes(lambda: Request([5], SamplingParams(embedding_bias=biases())))
    assert num_bytes < 4.1 * LONG
    assert max(abs(kept - bias) for kept, bias in zip(request.params.embedding_bias, biases())) < 1e-6
    assert make_processor().prepare(request)[0].params is request.params, "a request that is submitted again"
