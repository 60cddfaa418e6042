"""All kernels of drafts are compiled at start: with CUDA graphs, without, and in stages, which have none of drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from compiled_kernels import OPS, note_compilations
from engine_driver import GREEDY, make_engine, run_all
from rehearsed_graphs import rehearse_graphs
from slipstream.core.config import ParallelConfig
from slipstream.core.sampling_params import Guide
from tiny_heads import speculation
from tiny_model import make_tiny_llama, make_tiny_windowed

SHORT = replace(GREEDY, max_tokens=10)
SAMPLED = replace(SHORT, temperature=0.9, seed=5)
KINDS = (
    GREEDY,
    SAMPLED,
    replace(SAMPLED, num_draft_tokens=1),
    replace(SAMPLED, speculative_acceptance="typical"),
    replace(SAMPLED, num_draft_tokens=2, speculative_acceptance="typical"),
    replace(SHORT, guide=Guide("regex", "[a-z ]{12,18}"), ignore_eos=False),
)
ACCEPT, ADVANCE, LEVEL, MOVE, UNPACK = OPS.values()
# by method: the kernels that its drafts launch
USED = {
    "ngram": {ACCEPT},
    "draft_model": {ACCEPT, LEVEL},
    "medusa": {ACCEPT, ADVANCE, MOVE},
    "mtp": {ACCEPT, ADVANCE, LEVEL},
    "eagle": {ACCEPT, ADVANCE, LEVEL, MOVE},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"), num_layers=2)


@pytest.mark.parametrize("place", ["no graphs", "graphs", "stages", "windows"])
@pytest.mark.parametrize("method", USED)
def test_nothing_is_compiled_behind_the_start(
    method: str,
    place: str,
    llama: Path,
    prompts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One, two and three requests draft, of each kind some; block tables have one group or, with windows, several."""
    model = make_tiny_windowed(tmp_path / "windowed", 24) if place == "windows" else llama
    if place == "graphs":
        rehearse_graphs(monkeypatch, (1, 3))
    compiled = note_compilations(monkeypatch)
    drafting = speculation(method, model, tmp_path / "heads")
    parallel = ParallelConfig(pipeline_parallel_size=2 if place == "stages" else 1)
    # an odd number of requests: the halves of a tensor then begin at other addresses
    scheduler = {"overlap_scheduling": "on", "max_num_seqs": 7}
    engine = make_engine(model, scheduler=scheduler, speculation=drafting, parallel=parallel)
    try:
        at_start = set(compiled)
        compiled.clear()
        for count in (1, 2, 3):
            for params in KINDS:
                run_all(engine, [prompt * 3 for prompt in prompts[2 : 2 + count]], [params] * count)
        run_all(engine, prompts[: len(KINDS)], list(KINDS))
        assert engine.error is None
        later = {kernel for kernel, *_ in compiled}
        used = USED[method] - ({ADVANCE} if place == "stages" else set()) | ({UNPACK} if place == "graphs" else set())
        assert later >= used, "the test shows nothing else"
        assert compiled <= at_start
    finally:
        engine.close()
