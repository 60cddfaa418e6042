"""Requests that sample cost as little as greedy ones: their graph draws for them, and no logits are copied to fp32 but
those of rows that somebody edits."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, Told, make_engine, model_worker, run_steps
from rehearsed_graphs import rehearse_graphs
from slipstream.core.request import Request
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.engine.step_inputs import new_request
from slipstream.worker.host_copy import Staging
from slipstream.worker.launched_step import RunningStep
from slipstream.worker.model_runner import ModelRunner
from slipstream.worker.request_state import RequestState
from slipstream.worker.sample.draws import StaticDraws, draws_of
from slipstream.worker.sample.sampler import PendingTokens, RowContext, Sampler
from slipstream.worker.sample.structured_output import GrammarMasks
from slipstream_kernels import ops
from tiny_model import make_tiny_llama

CPU = torch.device("cpu")
SAMPLED = replace(GREEDY, temperature=0.9, seed=5)
ALIKE = (
    replace(SAMPLED, max_tokens=40), GREEDY, replace(SAMPLED, temperature=0.7, top_p=0.8, seed=6, max_tokens=31),
    replace(SAMPLED, top_k=7, seed=7), replace(SAMPLED, min_p=0.1, seed=8, max_tokens=17),
    replace(SAMPLED, top_k=30, top_p=0.95, min_p=0.01, seed=-9),
)  # fmt: skip
LATER = (
    replace(SAMPLED, repetition_penalty=1.4, seed=3, max_tokens=9), replace(SAMPLED, logprobs=2, max_tokens=12),
    replace(SAMPLED, guide=Guide("regex", "[a-z]{12}"), max_tokens=11), replace(GREEDY, logit_bias=((4, 2.0),)),
)  # fmt: skip


def _texts(
    checkpoint: Path,
    prompts: list[list[int]],
    overlap: str,
    later: tuple[SamplingParams, ...] = (),
    model: dict[str, object] | None = None,
) -> list[Told]:
    """Requests that nobody edits; then, after nine steps, others among them."""
    blocks = {"block_size": 16} if model else {}
    engine, told = make_engine(checkpoint, model, blocks, {"overlap_scheduling": overlap}), dict[Request, Told]()
    requests = [Request(list(prompt), params, handle=i) for i, (prompt, params) in enumerate(zip(prompts, ALIKE))]
    for request in requests:
        engine.submit(request)
    run_steps(engine, told, 9)
    late = [Request(list(prompts[i]), params, handle=20 + i) for i, params in enumerate(later)]
    for request in late:
        engine.submit(request)
    run_steps(engine, told)
    return [told[request] for request in (*requests, *late)]


def _note_draws(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[bool, bool]]:
    """For each step that samples: whether its graph could draw, and whether its tokens are those of the graph."""
    found: Counter[tuple[bool, bool]] = Counter()
    draw_tokens, logits_of, num_made = ModelRunner._draw_tokens, ModelRunner._logits, Counter[str]()

    def noted(
        runner: ModelRunner, running: RunningStep, sampling: list[RequestState], masks: GrammarMasks | None
    ) -> PendingTokens:
        num_made.clear()
        pending = draw_tokens(runner, running, sampling, masks)
        is_there = pending.token_ids.data_ptr() == runner._drawn.token_ids.data_ptr()
        found[running.tensors.is_drawn, is_there and not num_made] += 1
        return pending

    def counted(runner: ModelRunner, running: RunningStep, is_whole: bool, count: int) -> torch.Tensor:
        num_made["logits"] += 1
        return logits_of(runner, running, is_whole, count)

    monkeypatch.setattr(ModelRunner, "_draw_tokens", noted)
    monkeypatch.setattr(ModelRunner, "_logits", counted)
    return found


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_sampled_decodes_take_what_their_graph_drew(
    tiny_llama: Path, prompts: list[list[int]], overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, sampled and filtered ones together, token for token; nothing is drawn behind the graph."""
    expected = _texts(tiny_llama, prompts, "off")
    rehearse_graphs(monkeypatch, (1, 3, 8))
    found = _note_draws(monkeypatch)
    monkeypatch.setattr(Sampler, "sample", None)  # nobody asks for it
    assert [told.token_ids for told in _texts(tiny_llama, prompts, overlap)] == [told.token_ids for told in expected]
    assert found[True, True] >= 38 and not found[True, False], found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("no_tf32")
def test_captured_draws_are_those_of_eager_steps(tmp_path: Path, prompts: list[list[int]]) -> None:
    """On a GPU, with draws among others: in fp32, so that the batch does not matter."""
    checkpoint, texts = make_tiny_llama(tmp_path, head_dim=64), []
    for graphs in ("off", "1,3,8,12"):
        model = {"device": "cuda", "dtype": "float32", "cuda_graphs": graphs}
        for later in ((), LATER[:2]):
            texts.append([told.token_ids for told in _texts(checkpoint, prompts, "on", later, model)])
    assert texts[:2] == texts[2:]


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_only_edited_rows_are_drawn_behind_the_graph(
    tiny_llama: Path, prompts: list[list[int]], overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xgrammar")
    expected = _texts(tiny_llama, prompts, "off", LATER)
    rehearse_graphs(monkeypatch, (1, 3, 8, 12))
    found, sample, shares = _note_draws(monkeypatch), Sampler.sample, set[tuple[int, int]]()

    def noted(sampler: Sampler, requests: list[RequestState], *arguments: object, **others: object) -> PendingTokens:
        pending, rows = sample(sampler, requests, *arguments, **others), sampler._composition  # type: ignore[arg-type]
        assert rows is not None
        shares.add((0 if rows.edited is None else len(rows.edited.rows), len(requests)))
        return pending

    monkeypatch.setattr(Sampler, "sample", noted)
    texts = _texts(tiny_llama, prompts, overlap, LATER)
    assert [told.token_ids for told in texts] == [told.token_ids for told in expected]
    values = [[[entry.logprob for entry in told.logprobs] for told in some] for some in (texts, expected)]
    assert [pytest.approx(row, abs=1e-5) for row in values[1]] == values[0] and any(values[0])
    assert found[True, True] and found[True, False]
    assert any(0 < num_edited < count for num_edited, count in shares), "edited rows among others"
    assert all(num_edited <= 3 for num_edited, _ in shares), "log-probabilities edit nothing"


def test_parameters_are_copied_when_other_requests_draw(
    tiny_llama: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearse_graphs(monkeypatch, (1, 3, 8))
    engine = make_engine(tiny_llama, scheduler={"overlap_scheduling": "on"})
    staging, send, num_sent = model_worker(engine).runner._drawn.draws._staging, Staging.send, [0]

    def counted(own: Staging, source: object) -> None:
        num_sent[0] += own is staging
        send(own, source)  # type: ignore[arg-type]

    monkeypatch.setattr(Staging, "send", counted)
    told: dict[Request, Told] = {}
    sent = []
    for params in (GREEDY, replace(SAMPLED, max_tokens=60)):
        requests = [Request(list(prompt), params, handle=i) for i, prompt in enumerate(prompts[:3])]
        for request in requests:
            engine.submit(request)
        run_steps(engine, told, 6)
        sent.append(num_sent[0])
        run_steps(engine, told, 15)
        sent.append(num_sent[0])
    assert sent[:2] == [0, 0], "all rows are greedy from the start"
    assert 1 <= sent[2] == sent[3], sent


@pytest.mark.parametrize("seed", range(3))
def test_static_parameters_are_those_of_the_step(seed: int) -> None:
    """Requests join, leave and change places; rows behind them are greedy."""
    dice, static = random.Random(seed), StaticDraws(12, CPU)
    pool = [
        RequestState(new_request(Request([1, 2], replace(params, seed=None), seed=dice.getrandbits(64))))
        for params in ALIKE * 2
    ]
    greedy = [state for state in pool if state.is_greedy]
    for _ in range(60):
        chosen = dice.sample(greedy, 2) if dice.random() < 0.3 else dice.sample(pool, dice.randrange(1, 13))
        for _ in range(dice.randrange(1, 3)):
            static.load(chosen)
            fresh, found = draws_of([*chosen, *pool], CPU), static.first(12)
            count, drawn = len(chosen), [state.is_greedy for state in chosen]
            is_drawn = ~torch.tensor(drawn)
            assert fresh.metadata.temperature is not None and found.metadata.temperature is not None
            assert torch.equal(found.metadata.temperature[:count], fresh.metadata.temperature[:count])
            assert not found.metadata.temperature[count:].any()
            kept = zip((found.seeds, *found.metadata.filters), (fresh.seeds, *fresh.metadata.filters), strict=True)
            for own, expected in kept:
                assert own is not None and expected is not None
                assert torch.equal(own[:count][is_drawn], expected[:count][is_drawn])


def test_only_what_is_edited_is_copied_to_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the dtypes and rows of what is drawn; a mask reaches its row among the edited ones."""
    kinds = (
        {"temperature": 0.8}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.9, "logit_bias": ((3, 5.0),)},
        {"temperature": 0.0}, {"temperature": 1.0, "logprobs": 1}, {"temperature": 0.0},
    )  # fmt: skip
    states = [
        RequestState(replace(new_request(Request([1] * 5, SamplingParams(**kind), seed=i)), has_grammar=i == 5))  # type: ignore[arg-type]
        for i, kind in enumerate(kinds)
    ]
    logits, positions = torch.randn(6, 64, generator=torch.Generator().manual_seed(3)).bfloat16(), torch.arange(6)
    seen: list[tuple[int, torch.dtype]] = []
    for name in ("sample", "greedy"):
        original = getattr(ops, name)

        def noted(logits: torch.Tensor, *arguments: object, original=original) -> torch.Tensor:  # type: ignore[no-untyped-def]
            seen.append((len(logits), logits.dtype))
            return original(logits, *arguments)

        monkeypatch.setattr(ops, name, noted)
    sampler = Sampler(64, 6, 64, CPU)

    def drawn(rows: list[int], **others: object) -> list[int]:
        seen.clear()
        own = [states[row] for row in rows]
        return sampler.sample(own, logits[rows].clone(), positions[rows], **others).result().token_ids  # type: ignore[arg-type]

    plain = drawn([0, 1, 3, 4])
    assert seen == [(4, torch.bfloat16)]
    bits = torch.tensor([[1 << 7, 0]], dtype=torch.int32).numpy()
    masked = RowContext(masks=GrammarMasks([5], bits))
    mixed = drawn([0, 1, 2, 3, 4, 5], context=masked)
    assert seen == [(6, torch.bfloat16), (2, torch.float32)]
    assert [mixed[row] for row in (0, 1, 3, 4)] == plain and mixed[5] == 7
    assert mixed[2] == drawn([2])[0] and seen == [(1, torch.float32)]
    assert drawn(list(range(6)), context=masked, drawn=torch.tensor(mixed)) == mixed
    assert seen == [(2, torch.float32)], "the graph has drawn the others"
