"""core/prefill_budget.py, alone and in the scheduler: prompts beside decodes take about as long in every step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from fake_llm import FakeLLM, make_llm, make_request
from slipstream.core.prefill_budget import MIN_CHUNK, PrefillBudget
from slipstream.core.request import Request

PARITY = 1000.0


def test_tokens_count_by_their_context() -> None:
    budget = PrefillBudget(1200, PARITY)
    budget.begin_step(num_decodes=3)
    assert budget.take(0, 300, 4096) == 300
    assert budget.take(2000, 5000, 4096) == 300  # 900 left, three for each
    assert budget.take(0, 5000, 4096) == 0
    budget.begin_step(num_decodes=3)
    assert budget.take(9000, 5000, 4096) == MIN_CHUNK  # 120 would fit
    assert budget.take(0, 1, 4096) == 0
    budget.begin_step(num_decodes=3)
    assert budget.take(0, 5000, 70) == 70


def test_a_limit_below_the_least_chunk_holds() -> None:
    budget = PrefillBudget(32, PARITY)
    budget.begin_step(num_decodes=1)
    assert budget.take(100_000, 5000, 4096) == 32


def test_without_decodes_or_chunks_there_is_no_limit() -> None:
    for limit, num_decodes in ((16, 0), (None, 5)):
        budget = PrefillBudget(limit, PARITY)
        budget.begin_step(num_decodes)
        assert [budget.take(50_000, 3000, 4096), budget.take(0, 2000, 1096)] == [3000, 1096]


def chunks(llm: FakeLLM, prompt: Request) -> Iterator[tuple[int, int, int]]:
    """(computed, new, other requests) of each step that computes the prompt."""
    while prompt.num_output_tokens == 0:
        llm.step()
        for row in llm.steps[-1].rows:
            if row.request is prompt:
                yield row.num_computed_tokens, row.num_scheduled_tokens, len(llm.steps[-1].requests) - 1


@pytest.mark.parametrize("limit", [0, 300])
def test_a_long_prompt_gets_shorter_chunks_as_it_goes(limit: int) -> None:
    llm = make_llm(max_num_batched_tokens=600, max_mixed_prefill_tokens=limit, num_blocks=2000, max_model_len=6000,
                   attention_parity=PARITY)  # fmt: skip
    streams = [make_request(3 + index, 2000) for index in range(4)]
    for stream in streams:
        llm.scheduler.add(stream)
    llm.step()
    llm.scheduler.add(prompt := make_request(3000, 4))
    found = list(chunks(llm, prompt))
    assert sum(new for _, new, _ in found) == 3000
    most = limit or 600
    for computed, new, others in found[:-1]:
        assert others == 4  # every stream decodes in every step
        cost = new * (1 + computed / PARITY)
        assert cost <= most or new == MIN_CHUNK
        assert cost > most * 0.9 or new + others == 600
    assert found[0][1] > 2 * found[-2][1]


def test_a_prompt_alone_takes_whole_steps() -> None:
    llm = make_llm(max_num_batched_tokens=600, max_mixed_prefill_tokens=100, num_blocks=2000, max_model_len=6000,
                   attention_parity=PARITY)  # fmt: skip
    llm.scheduler.add(prompt := make_request(1500, 4))
    assert [new for _, new, _ in chunks(llm, prompt)] == [600, 600, 300]


def test_whole_prompts_stay_whole_without_chunked_prefill() -> None:
    llm = make_llm(max_num_batched_tokens=600, max_mixed_prefill_tokens=100, enable_chunked_prefill=False,
                   num_blocks=2000, max_model_len=600, attention_parity=PARITY)  # fmt: skip
    llm.scheduler.add(make_request(3, 100))
    llm.step()
    llm.scheduler.add(prompt := make_request(500, 4))
    assert [new for _, new, _ in chunks(llm, prompt)] == [500]


def test_no_parity_means_equal_tokens() -> None:
    budget = PrefillBudget(100, math.inf)
    budget.begin_step(1)
    assert budget.take(10**6, 500, 4096) == 100
