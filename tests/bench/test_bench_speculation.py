"""bench_speculation.py's simulation, every method through the graphs that a GPU has: it must not fail there first."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rehearsed_graphs import rehearse_graphs
from slipstream.core import speculation
from slipstream.worker.spec_decode import verifier
from slipstream.worker.spec_decode.interface import PROPOSERS
from slipstream.worker.spec_decode.verification import Verification

sys.path.insert(0, str(Path(__file__).parent))

import bench_speculation
from shapes import SHAPES, Shape

SMALL = Shape(64, 3, 4, 2, 96, 600, max_len=512, head_dim=16)
METHODS = ("ngram", "draft_model", "medusa", "mtp", "eagle")


@pytest.fixture
def drafts_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether drafts pay depends on the times of this machine: the planner decides, and is not obeyed."""
    choose = speculation.DraftPlanner._most_useful

    def choose_most(planner: speculation.DraftPlanner, method: str, most: int) -> int:
        assert 0 <= choose(planner, method, most) <= most
        return most

    monkeypatch.setattr(speculation.DraftPlanner, "_most_useful", choose_most)
    monkeypatch.setattr(speculation._Load, "is_slower", lambda load: False)
    monkeypatch.setattr(speculation._Load, "needs_trial", lambda load, plain_seconds: False)


def test_every_method_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], drafts_always_pay: None
) -> None:
    monkeypatch.setitem(SHAPES, "tiny", SMALL)
    monkeypatch.setattr(verifier, "Verification", Verification)  # put back after the test
    for name in ("ngram", "eagle"):
        monkeypatch.setitem(PROPOSERS._entries, name, PROPOSERS.get(name))
    rehearse_graphs(monkeypatch, (2,))
    sizes = "--concurrency 2 --input-len 24 --output-len 40 --repeats 1 --throttle auto"
    options = "--options device=cpu num_blocks=64 overlap_scheduling=on eagle_depth=3 eagle_top_k=4"
    bench_speculation.main(["--shape", "tiny", "--methods", *METHODS, *sizes.split(), *options.split()])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    found = {line["method"]: line for line in lines if "tok_s" in line}
    assert set(found) == {"plain", *METHODS}
    assert found["plain"]["tokens_per_step"] == 1.0
    costs = {line["method"]: line["costs"] for line in lines if "costs" in line}
    for method in METHODS:
        assert found[method]["tokens_per_step"] > 1.2, method
        assert any(rows > 1 and tokens > 1 for rows, _, _, _, tokens in found[method]["by_rows"])
        assert costs[method]["plain"] and costs[method]["verified"]
