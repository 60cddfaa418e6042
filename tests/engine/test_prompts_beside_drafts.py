"""What servers that speculate compute of prompts: of the last layer what is read, and whole steps as CUDA graphs.

Heads with a cache of their own read all rows; others read each request's last, so that their servers do as plain ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, make_engine, model_worker, run_all, run_steps
from rehearsed_graphs import num_replays, rehearse_graphs
from slipstream.core.config import SpeculationConfig
from slipstream.core.request import Request
from slipstream.core.speculation import DraftPlanner
from slipstream.nn.attention.paged import PagedAttention
from slipstream.nn.decoder import Decoder
from slipstream.nn.read_spec import read_spec
from slipstream.worker.graph_shapes import PromptShape
from slipstream.worker.spec_decode.draft_model import NUM_DRAFTS, DraftModelProposer
from speculation_config import speculation_config
from tiny_heads import make_eagle, make_eagle3, make_medusa, make_mtp
from tiny_model import make_tiny_llama

READS_ALL_ROWS = {"ngram": False, "draft_model": False, "medusa": False, "mtp": True, "eagle": True, "eagle3": True}
SAMPLED = replace(GREEDY, temperature=0.9, seed=5, top_k=50, max_tokens=12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), num_layers=3)


def speculation(method: str, model: Path, folder: Path) -> SpeculationConfig:
    made = {
        "ngram": lambda: ("ngram", {"ngram_min": 1}),
        "draft_model": lambda: ("draft_model", {"draft_model": str(model)}),
        "medusa": lambda: ("medusa", {"medusa_heads": str(make_medusa(model, folder))}),
        "mtp": lambda: ("mtp", {"mtp_module": str(make_mtp(model, folder))}),
        "eagle": lambda: ("eagle", {"eagle_head": str(make_eagle(model, folder))}),
        "eagle3": lambda: ("eagle", {"eagle_head": str(make_eagle3(model, folder))}),
    }
    name, fields = made[method]()
    return speculation_config(name, throttle="off", num_draft_tokens=6, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("method", "overlap"), [*((method, "on") for method in READS_ALL_ROWS), ("medusa", "off")])
def test_prompts_are_computed_as_far_as_they_are_read(
    model: Path,
    tmp_path: Path,
    prompts: list[list[int]],
    method: str,
    overlap: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts longer than decodes, in chunks, beside verifications; some requests draft and some do not."""
    chosen = [prompts[place] * 4 for place in (5, 6, 7, 11)]
    each = [replace(GREEDY, max_tokens=16), SAMPLED, replace(GREEDY, num_draft_tokens=0), replace(SAMPLED, logprobs=1)]
    expected = [told.token_ids for told in run_all(make_engine(model), chosen, each)]
    num_last: list[int] = []
    forward_last = Decoder.forward_last

    def count(*arguments: object) -> torch.Tensor:
        num_last.append(1)
        return forward_last(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "forward_last", count)
    rehearse_graphs(monkeypatch, (4,))
    engine = make_engine(
        model,
        scheduler={"max_num_batched_tokens": 150, "overlap_scheduling": overlap},
        speculation=speculation(method, model, tmp_path),
    )
    runner = model_worker(engine).runner
    num_captured = len(num_last)
    assert [told.token_ids for told in run_all(engine, chosen, each)] == expected
    assert num_replays(runner._graphs) > 10 and num_replays(runner._prompt_graphs) > 0
    assert (len(num_last) > num_captured) is not READS_ALL_ROWS[method]


@pytest.mark.parametrize("method", [method for method, reads_all in READS_ALL_ROWS.items() if reads_all])
def test_prompts_beside_decodes_of_requests_that_do_not_draft(
    model: Path, tmp_path: Path, prompts: list[list[int]], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In graphs, whose rows have gaps between decodes and prompts; tokens of decodes are known to the device only."""
    chosen = [prompts[place] * 4 for place in (5, 6, 7, 11)]
    params = replace(GREEDY, num_draft_tokens=0, max_tokens=16)
    expected = [told.token_ids for told in run_all(make_engine(model), chosen, params)]
    gaps: set[int] = set()
    gather = PromptShape.gather

    def note(shape: PromptShape, rows: torch.Tensor, num_decodes: int, num_tokens: int) -> torch.Tensor:
        gaps.add(shape.num_decodes - num_decodes)
        return gather(shape, rows, num_decodes, num_tokens)

    monkeypatch.setattr(PromptShape, "gather", note)
    rehearse_graphs(monkeypatch, (4,))
    engine = make_engine(
        model,
        scheduler={"max_num_batched_tokens": 150, "overlap_scheduling": "on"},
        speculation=speculation(method, model, tmp_path),
    )
    assert [told.token_ids for told in run_all(engine, chosen, params)] == expected
    assert len(gaps - {0}) > 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("no_tf32")
@pytest.mark.parametrize("method", READS_ALL_ROWS)
def test_graphs_of_prompts_are_eager_steps(
    tmp_path: Path, prompts: list[list[int]], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on a GPU, with real graphs of prompts, verifications and drafting. In float32, whose trees have none,
    for chains; trees to the bit in deterministic mode."""
    monkeypatch.setattr("slipstream.worker.cuda_graphs.LAUNCH_BOUND", 1e9)
    has_trees = method in ("medusa", "eagle", "eagle3")
    arithmetic = {"dtype": "bfloat16", "deterministic": True} if has_trees else {"dtype": "float32"}
    model = make_tiny_llama(tmp_path / "model", head_dim=64, num_layers=3)
    texts = []
    for graphs in ("off", "2,4"):
        engine = make_engine(
            model,
            {"device": "cuda", "cuda_graphs": graphs, **arithmetic},
            {"block_size": 16},
            {"max_num_batched_tokens": 150, "overlap_scheduling": "on"},
            speculation(method, model, tmp_path / f"heads-{graphs}"),
        )
        assert bool(model_worker(engine).runner._prompt_graphs.shapes) is (graphs != "off")
        chosen = [prompts[place] * 4 for place in (5, 6, 7, 11)]
        texts.append([told.token_ids for told in run_all(engine, chosen, replace(GREEDY, max_tokens=16))])
    assert texts[0] == texts[1]


def test_a_model_whose_trees_have_no_graphs_says_so(model: Path) -> None:
    """Outside of Hopper's kernels trees are attended to in Triton-lang, where the heads of a token fit a tile."""
    spec = read_spec(model)
    backend = PagedAttention(spec.map_attention(lambda own: replace(own, head_dim=64)))
    assert backend.graph_refusal(64, has_trees=True) is None
    backend = PagedAttention(spec.map_attention(lambda own: replace(own, head_dim=64, num_q_heads=65, num_kv_heads=1)))
    assert backend.graph_refusal(64) is None
    assert "trees of drafts" in (backend.graph_refusal(64, has_trees=True) or "")
    assert "head_dim" in (PagedAttention(spec).graph_refusal(64, has_trees=True) or "")


def test_a_draft_model_reads_a_long_prompt_in_steps_that_the_others_can_wait_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"max_num_batched_tokens": 64, "max_mixed_prefill_tokens": 32}
    engine = make_engine(model, scheduler=limits, speculation=speculation("draft_model", model, tmp_path))
    sizes: list[int] = []
    forward = DraftModelProposer._forward
    monkeypatch.setattr(
        DraftModelProposer,
        "_forward",
        lambda self, batch: (sizes.append(len(batch.token_ids)), forward(self, batch))[1],
    )
    params = replace(GREEDY, max_tokens=60)
    [short] = engine.submit(Request([5, 6, 7], params))
    run_steps(engine, {}, 4)
    [long] = engine.submit(Request([place % 400 for place in range(400)], params))
    per_step, measured = [], []
    monkeypatch.setattr(DraftPlanner, "measure", lambda self, step: measured.append(len(per_step)))
    while engine.has_work:
        sizes.clear()
        engine.step()
        per_step.append(sum(sizes))
    assert max(per_step) <= 32 + 2 * NUM_DRAFTS, per_step
    is_behind = [place for place, size in enumerate(per_step) if size > 2 * (1 + 2 * NUM_DRAFTS)]
    assert len(is_behind) >= 400 // 32 and not {place + 1 for place in is_behind[:-1]} & set(measured)
    plain = run_all(make_engine(model), [short.prompt_token_ids, long.prompt_token_ids], params)
    assert [short.output_token_ids, long.output_token_ids] == [told.token_ids for told in plain]
    assert short.num_accepted_tokens > 30 < long.num_accepted_tokens
