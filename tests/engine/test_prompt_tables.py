"""Prompt tables: rows that equal the model's own give its own tokens, however a prompt is computed, and only then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, Told, make_engine, model_worker, run_steps
from slipstream.core.adapters import Matrix
from slipstream.core.errors import CapacityError, RequestError
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.prompt_tables import TableBudget
from speculation_config import speculation_config

LENGTH = 40
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    """Its embedding is one that fp16 can say. Chunked, overlapped, and so few blocks that requests are preempted."""
    made = make_engine(
        tiny_llama,
        {"max_model_len": 128},
        {"num_blocks": 24},
        {"max_num_batched_tokens": 16, "overlap_scheduling": "on"},
        speculation_config("ngram", ngram_min=1, throttle="off"),
    )
    weight = model_worker(made).runner.model.embedding.weight
    weight.copy_(weight.half().float())
    yield made
    made.close()


def own_rows(engine: Engine, token_ids: list[int]) -> Matrix:
    rows = model_worker(engine).runner.model.embedding.weight[token_ids].half()
    return Matrix("e", (len(token_ids), rows.shape[1]), rows.numpy().tobytes())


def prompt_of(seed: int) -> list[int]:
    return torch.randint(5, 300, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


def tabled(engine: Engine, prompt: list[int], places: list[int], params: SamplingParams = GREEDY) -> Request:
    """The same prompt, with the tokens at these places as rows of a table, in reverse."""
    ids, first = list(prompt), engine.spec.vocab_size
    for row, place in enumerate(reversed(places)):
        ids[place] = first + row
    return Request(ids, params, prompt_table=own_rows(engine, [prompt[place] for place in reversed(places)]))


def run(engine: Engine, requests: list[Request]) -> list[list[int]]:
    sequences = [sequence for request in requests for sequence in engine.submit(request)]
    told = {sequence: Told() for sequence in sequences}
    run_steps(engine, told)
    assert engine.error is None and not any(one.error for one in told.values())
    return [told[sequence].token_ids for sequence in sequences]


def test_own_rows_give_the_models_own_tokens(engine: Engine) -> None:
    """In the first chunk and in later ones, beside prompts without, twice: the second time from the prefix cache."""
    prompts = [prompt_of(seed) for seed in range(4)]
    places = [[0, 1, 2, 3], [0, 15, 16, 17, LENGTH - 1], [20], list(range(LENGTH))]
    params = [GREEDY, SAMPLED, replace(SAMPLED, n=2), GREEDY]
    expected = run(engine, [Request(list(prompt), one) for prompt, one in zip(prompts, params)])
    for _ in range(2):
        requests = [tabled(engine, *one) for one in zip(prompts, places, params)]
        requests.insert(2, Request(list(prompts[0]), GREEDY))
        found = run(engine, requests)
        assert found == [*expected[:2], expected[0], *expected[2:]]
        assert engine.scheduler.cache.num_used_blocks == 0


def test_after_a_preemption(engine: Engine) -> None:
    """Four that fill the pool: what is computed again has the table again."""
    prompts, params = [prompt_of(seed) for seed in range(10, 14)], replace(GREEDY, max_tokens=24)
    expected = [run(engine, [Request(list(prompt), params)])[0] for prompt in prompts]
    requests = [tabled(engine, prompt, [1, 2, 30], params) for prompt in prompts]
    assert run(engine, requests) == expected
    assert sum(request.num_preemptions for request in requests) > 0


def test_equal_ids_with_other_tables_share_nothing(engine: Engine) -> None:
    prompt, vocab_size = prompt_of(20), engine.spec.vocab_size
    ids = [vocab_size, vocab_size + 1, *prompt]
    first, second = (Request(list(ids), GREEDY, prompt_table=own_rows(engine, rows)) for rows in ([7, 8], [9, 10]))
    expected = run(engine, [Request([*rows, *prompt], GREEDY) for rows in ([7, 8], [9, 10])])
    assert [run(engine, [first])[0], run(engine, [second])[0]] == expected
    assert second.num_cached_tokens == 0
    again = Request(list(ids), GREEDY, prompt_table=own_rows(engine, [7, 8]))
    assert run(engine, [again]) == expected[:1] and again.num_cached_tokens > 0


def test_one_table_in_other_places_and_orders_shares_nothing(engine: Engine) -> None:
    """Between tokens 0, which stand for rows while a prompt is computed."""
    prompt, table = prompt_of(21), own_rows(engine, [7, 8])
    own = {engine.spec.vocab_size: 7, engine.spec.vocab_size + 1: 8}
    one, other = own
    for head in ([one, 0, other], [0, one, other], [one, other, 0], [other, 0, one], [other, 0, other]):
        plain = Request([*(own.get(token_id, 0) for token_id in head), *prompt], GREEDY)
        request = Request([*head, *prompt], GREEDY, prompt_table=table, prompt_table_size=2)
        assert run(engine, [request]) == run(engine, [plain]) and request.num_cached_tokens == 0


def test_refusals(engine: Engine) -> None:
    vocab_size, good = engine.spec.vocab_size, own_rows(engine, [5, 6])
    width = good.shape[1]
    nan = Matrix("e", (1, width), torch.full((width,), torch.nan).half().numpy().tobytes())
    cases = [
        (
            Request([vocab_size + 2], GREEDY, prompt_table=good),
            f"input_ids: token id {vocab_size + 2} .*{vocab_size + 1}",
        ),
        (Request([vocab_size + 1], GREEDY, prompt_table=good, prompt_table_size=1), "input_ids: token id"),
        (Request([vocab_size], GREEDY, prompt_table=good, prompt_table_size=3), "prompt_vocab_size: got 3, .* 2 rows"),
        (Request([5], GREEDY, prompt_table=good), "prompt_embedding_table: no token of the prompt"),
        (Request([vocab_size], GREEDY, prompt_table=nan), "prompt_embedding_table: .*finite"),
        (Request([vocab_size], GREEDY, prompt_table=Matrix("e", (1, 2), bytes(4))), r"got shape \[1, 2\], .*hidden"),
        (Request([vocab_size], replace(GREEDY, beam_width=2), prompt_table=good), "without beam search"),
        (Request([vocab_size], replace(GREEDY, prompt_logprobs=0), prompt_table=good), "without beam search and"),
        (Request([vocab_size], GREEDY), "prompt: token id"),
    ]
    for request, refusal in cases:
        with pytest.raises(RequestError, match=refusal):
            engine.submit(request)


def test_tables_of_all_requests_have_a_bound() -> None:
    def request(handle: int, num_bytes: int) -> Request:
        return Request([5], GREEDY, handle=handle, prompt_table=Matrix("e", (1, num_bytes // 2), bytes(num_bytes)))

    budget = TableBudget(100)
    with pytest.raises(RequestError, match="has 102 bytes, accepted: at most max_prompt_table_bytes=100"):
        budget.take(request(1, 102))
    budget.take(request(2, 60))
    with pytest.raises(CapacityError, match="42 bytes of prompt_embedding_table beside 60"):
        budget.take(request(3, 42))
    budget.give(2)
    budget.give(2)
    budget.take(request(3, 100))


def test_models_with_adapters_take_none(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, {"enable_lora": True})
    with pytest.raises(RequestError, match="prompt_embedding_table: accepted by models without enable_lora"):
        engine.submit(Request([engine.spec.vocab_size], GREEDY, prompt_table=own_rows(engine, [5])))
    engine.close()
