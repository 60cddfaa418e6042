"""What a request's parameters cost per token at their maximum, against their least: longer lists cost no more.

Ratios within one process, of the best of several runs, with room for a busy machine: before lists went through automata
and tensors they were up to 150.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from slipstream.core.config import StructuredOutputConfig
from slipstream.core.finish import StopConditions
from slipstream.core.outputs import StepOutput
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.input_processor import InputProcessor
from slipstream.engine.output_processor import OutputProcessor
from slipstream.engine.step_inputs import new_request
from slipstream.protocol.request_parser import ClientRequest
from slipstream.tokenizer.tokenizer import TextTokenizer
from slipstream.worker.request_state import RequestState
from slipstream.worker.sample.logit_bias import LogitsProcessors
from slipstream.worker.sample.penalties import TokenHistory

VOCAB = 4096
NUM_TOKENS, NUM_WARM = 60, 20
MOST_DEARER = 6.0
TOKENIZER = TextTokenizer.load(Path(__file__).resolve().parents[2] / "models" / "slipstream-demo-code")
REPEATED = TOKENIZER.encode("\n", False)[0]


class Spec:
    vocab_size = VOCAB
    hidden_size = 64
    eos_token_ids = (0,)


def many_words(count: int) -> tuple[tuple[int, ...], ...]:
    """As much of the text as there is begins each of them, and none is ever complete."""
    return tuple((REPEATED,) * (size % 16 + 1) + (1000 + size,) for size in range(count))


def early(count: int) -> dict[str, object]:
    return {"stop_token_ids": tuple(range(1000, 1000 + count)), "min_tokens": NUM_TOKENS}


# name -> parameters of a request with so many entries
LISTS: dict[str, Callable[[int], dict[str, object]]] = {
    "stop": lambda count: {"stop": tuple(f"word {index:04d} no" for index in range(count))},
    "stop that always begins": lambda count: {"stop": tuple("\n" * (i % 16 + 1) + f"q{i}" for i in range(count))},
    "stop_token_ids": lambda count: {"stop_token_ids": tuple(range(1000, 1000 + count))},
    "stop_token_ids before min_tokens": early,
    "stop_words_ids": lambda count: {"stop_words_ids": many_words(count)},
    "bad_words_ids": lambda count: {"bad_words_ids": many_words(count)},
    "bad words of one token": lambda count: {"bad_words_ids": tuple((1000 + index,) for index in range(count))},
    "logit_bias": lambda count: {"logit_bias": tuple((1000 + index, 0.5) for index in range(count))},
    "embedding_bias": lambda count: {"embedding_bias": (0.5,) * (4 * count)},
}


def prepared(params: SamplingParams) -> Request:
    (request,) = InputProcessor(Spec(), TOKENIZER, StructuredOutputConfig()).prepare(Request([5] * 20, params))  # type: ignore[arg-type]
    request.stop_conditions = StopConditions(request, 10_000)
    return request


def seconds(params: SamplingParams) -> dict[str, float]:
    """Of NUM_TOKENS tokens: changing logits and looking for the end (engine thread), making text (output thread)."""
    request = prepared(params)
    edits = LogitsProcessors(VOCAB, torch.device("cpu"))
    state = RequestState(new_request(request))
    edits.compose([state])
    processor = OutputProcessor(TOKENIZER, lambda request, stop: None, lambda handle: None)
    processor.add(ClientRequest(request.handle, request, stream=True))
    logits = torch.zeros(1, VOCAB)
    spent = {"edits": 0.0, "ends": 0.0, "text": 0.0}
    for token in range(NUM_TOKENS):
        start = time.perf_counter()
        state.num_drawn_tokens = token + 1
        edits.apply(logits, [state])
        edited = time.perf_counter()
        state.token_ids.append(REPEATED)
        assert not request.stop_conditions.extend(request, [REPEATED])
        extended = time.perf_counter()
        processor.process([StepOutput(request, [REPEATED])])
        if token >= NUM_WARM:
            spent["edits"] += edited - start
            spent["ends"] += extended - edited
            spent["text"] += time.perf_counter() - extended
    return spent


def best(params: SamplingParams) -> dict[str, float]:
    runs = [seconds(params) for _ in range(4)]
    return {part: min(run[part] for run in runs) for part in runs[0]}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_as_long_as_it_may_be_costs_a_token_no_more_than_a_short_one(name: str) -> None:
    seen = []
    for _ in range(3):
        one, most = (best(SamplingParams(max_tokens=NUM_TOKENS + 1, **LISTS[name](count))) for count in (1, 1024))
        ratios = {part: round(most[part] / one[part], 1) for part in one}
        if max(ratios.values()) < MOST_DEARER:
            return
        seen.append(ratios)
    raise AssertionError(f"{name}: 1024 entries cost so many times what one costs: {seen}")


def test_a_long_prompt_with_penalties_costs_little_more_than_its_copy() -> None:
    prompt = [index % VOCAB for index in range(100_000)]
    seen = []
    for _ in range(4):
        requests = [Request(prompt, SamplingParams(repetition_penalty=1.1)) for _ in range(4)]
        states = [RequestState(new_request(request)) for request in requests]
        for state in states:
            state.num_drawn_tokens = 1
        history = TokenHistory(4, len(prompt) + 10, torch.device("cpu"))
        start = time.perf_counter()
        torch.tensor(prompt, dtype=torch.int32)
        copied = time.perf_counter()
        history.update(states)
        ratio = (time.perf_counter() - copied) / (copied - start)
        if ratio < MOST_DEARER:
            return
        seen.append(ratio)
    raise AssertionError(f"a history of 4 sequences takes so many times as long as a copy of the prompt: {seen}")
