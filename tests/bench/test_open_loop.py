"""The open loop: what it draws, what it counts, and that it runs through a real server."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest


@pytest.fixture
def loop(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(root / "tests/bench"))
    import open_loop

    return open_loop


def test_arrivals_are_those_of_the_rate_and_the_same_again(loop) -> None:
    from shapes import SHAPES

    load = loop.Load.parse("50:64:2")
    assert load == loop.Load(50.0, 64, 2.0)
    arrivals = loop.draw_arrivals(SHAPES["demo"], load, 20.0)
    assert arrivals == loop.draw_arrivals(SHAPES["demo"], load, 20.0)
    judged = [one for one in arrivals if one.is_judged]
    assert 900 < len(judged) < 1100 and 15 < len(arrivals) - len(judged) < 70
    assert all(before.at_s <= after.at_s < 20.0 for before, after in itertools.pairwise(arrivals))
    assert len({tuple(one.prompt[:64]) for one in judged}) == 1 and len(set(judged[0].prompt[:64])) > 50
    assert len({tuple(one.prompt) for one in judged}) > 900
    lengths = sorted(len(one.prompt) - 64 for one in judged)
    assert 250 < lengths[len(lengths) // 2] < 360 and 900 < lengths[len(lengths) * 9 // 10] < 1300
    assert {(len(one.prompt), one.num_output) for one in arrivals if not one.is_judged} == {(8192, 64)}


def test_a_request_is_good_by_its_first_token_and_its_gaps(loop) -> None:
    def timeline(ttft_s: float, gap_s: float, late_s: float = 0.0):
        times = [ttft_s + gap_s * index for index in range(200)]
        return loop.Timeline(0.0, [(time + late_s * (index > 150), 1) for index, time in enumerate(times)])

    served = [timeline(0.4, 0.04), timeline(0.6, 0.04), timeline(0.4, 0.06), timeline(0.4, 0.04, 0.2)]
    arrivals = [loop.Arrival(0.0, [1], 200) for _ in served]
    record = loop.summarise(loop.Load(2.0), arrivals, served, 2.0)
    # one gap of 200 may be long, two may not
    assert (record["goodput"], record["good_share"]) == (1.0, 0.5)
    assert (record["ttft_p50_ms"], record["ttft_p99_ms"], record["gap_p50_ms"]) == (400.0, 600.0, 40.0)
    unjudged = [loop.Arrival(0.0, [1], 200, index == 0) for index in range(4)]
    assert loop.summarise(loop.Load(2.0), unjudged, served, 2.0)["good_share"] == 1.0
    served[1].responses.pop()
    with pytest.raises(RuntimeError, match="199 tokens of 200"):
        loop.summarise(loop.Load(2.0), arrivals, served, 2.0)


def test_percentiles(loop) -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [loop.percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert loop.percentile([], 0.5) == 0.0


def test_it_runs_through_a_real_server(loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_open_loop
    import bench_triton

    if bench_triton.missing_server():
        pytest.skip(bench_triton.missing_server())
    monkeypatch.setattr(loop, "INPUT_RANGE", (4, 12))
    monkeypatch.setattr(loop, "OUTPUT_RANGE", (2, 4))
    out = tmp_path / "ours.jsonl"
    options = f"--shape demo --loads 6,6:64 --seconds 1.5 --max-model-len 256 --clients 2 --out {out}"
    options += " --set device=cpu --set memory_bytes=50000000"
    monkeypatch.setattr(sys, "argv", ["bench_open_loop.py", *options.split()])
    bench_open_loop.main()  # raises unless every token arrived
    plain, shared = map(json.loads, out.read_text().splitlines())
    assert (plain["rate"], plain["shared_prefix"], shared["shared_prefix"]) == (6.0, 0, 64)
    assert plain["requests"] > 2 and plain["out_tok_s"] > 0 and 0 < plain["ttft_p50_ms"] <= plain["ttft_p99_ms"]
    assert plain["sent_late_ms"] >= 0
