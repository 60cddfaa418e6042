"""Steps in graphs say what eager steps say while requests come, end, are cancelled and share prefixes.

Decodes, short prompts and long ones have graphs of their own, of which some draw and some do not: tokens that only the
device knows pass from each kind of step to each other one.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_driver import GREEDY, Told, make_engine, model_worker, run_all, run_steps
from rehearsed_graphs import num_replays, rehearse_graphs
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.nn.batch import ForwardBatch
from slipstream.worker.spec_decode.draft_batch import RowsAfter
from tiny_heads import speculation

KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logprobs": 2},
]
SCHEDULER: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "overlap_scheduling": "on"}


def _talk(engine: Engine, seed: int, num_kinds: int) -> list[Told]:
    """The same requests at the same steps for the same seed."""
    dice, told = random.Random(seed), dict[Request, Told]()
    requests: list[Request] = []
    for _ in range(120):
        live = [one for one in requests if not one.is_finished]
        if len(live) < 8 and dice.random() < 0.5:
            start = [dice.choice([5, 6])] * dice.choice([1, 8, 16])
            prompt = [*start, *(dice.randrange(20, 60) for _ in range(dice.choice([1, 9, 30, 70])))]
            kind = dice.choice(KINDS[:num_kinds])
            params = SamplingParams(max_tokens=dice.randrange(1, 24), ignore_eos=True, **kind)  # type: ignore[arg-type]
            requests += engine.submit(Request(prompt, params, handle=len(requests)))
        if live and dice.random() < 0.05:
            engine.cancel(dice.choice(live).handle)
        run_steps(engine, told, 1)
    run_steps(engine, told)
    assert engine.error is None and engine.scheduler.cache.num_used_blocks == 0
    return [told[one] for one in requests]


@pytest.mark.parametrize("num_kinds", [1, len(KINDS)], ids=["plain", "all"])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_those_of_eager_steps(
    tiny_llama: Path, seed: int, num_kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = make_engine(tiny_llama, scheduler=SCHEDULER)
    expected = _talk(eager, seed, num_kinds)
    eager.close()
    rehearse_graphs(monkeypatch, (1, 4, 8))
    engine = make_engine(tiny_llama, scheduler=SCHEDULER)
    found, runner = _talk(engine, seed, num_kinds), model_worker(engine).runner
    assert min(num_replays(runner._graphs), num_replays(runner._prompt_graphs)) > 8
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.finish_reason for one in found] == [one.finish_reason for one in expected]
    engine.close()


def test_a_step_of_plain_requests_draws_where_the_next_graph_reads(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own graph does not draw; tokens drawn elsewhere would have to be copied there."""
    rehearse_graphs(monkeypatch, (1, 4, 8))
    engine = make_engine(tiny_llama, scheduler=SCHEDULER)
    runner = model_worker(engine).runner
    engine.submit(Request([5] * 80, GREEDY))
    engine.step()
    assert num_replays(runner._prompt_graphs) == 1 and runner._sampled is not None
    assert runner._sampled.token_ids.data_ptr() == runner._drawn.token_ids.data_ptr()
    engine.close()


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("method", ["mtp", "eagle"])
def test_heads_write_to_no_block_of_others(
    tiny_llama: Path, tmp_path: Path, method: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request fills the last block that it may have, so its drafts would lie behind it. The static block tables are
    wider than those of the step, and keep what longer requests had there."""
    rehearse_graphs(monkeypatch, (1, 2))
    scheduler: dict[str, object] = {"policy": policy, "max_num_seqs": 2, "overlap_scheduling": "on"}
    drafts = speculation(method, tiny_llama, tmp_path)
    engine = make_engine(tiny_llama, model={"max_model_len": 128}, scheduler=scheduler, speculation=drafts)
    run_all(engine, [[9] * 60, [3] * 50], replace(GREEDY, max_tokens=60))
    num_tokens = 128 if policy == "max_utilization" else 81  # 80 slots: the last token needs none
    request = engine.submit(Request([5] * 49, replace(GREEDY, max_tokens=num_tokens - 49)))[0]
    written, rows_after = set[int](), RowsAfter.__call__

    def note(self: RowsAfter, *arguments: Any) -> ForwardBatch:
        rows = rows_after(self, *arguments)
        slots = {slot for slot in rows.slot_mapping.tolist() if slot >= 0}
        assert {slot // 8 for slot in slots} <= set(request.block_ids)
        written.update(slots)
        return rows

    monkeypatch.setattr(RowsAfter, "__call__", note)
    run_steps(engine, {})
    assert engine.error is None and request.num_tokens == num_tokens and len(written) > 20
    engine.close()
