"""The bench of long contexts on a small shape: every figure comes out, and registered contexts are not computed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bench_long_context


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    sizes = "--length 600 --streams 3 --stream-len 8 --stream-tokens 400 --quiet-steps 5 --limits 0,64 --batches 1,100"
    more = "--step-ms 1000000 --max-num-batched-tokens 256 --set device=cpu --set memory_bytes=50000000"
    more += " --beside-cached 100 --ratios 50"
    monkeypatch.setattr(sys, "argv", ["bench_long_context.py", *f"--shape demo {sizes} {more} --out {out}".split()])
    bench_long_context.main()
    plan, ttft, tpot, skipped, whole, limited, by_ratio = map(json.loads, out.read_text().splitlines())
    assert "memory plan" in plan["plan"][0] and ttft["input_len"] == 599 and ttft["ttft_ms"] > 0
    assert tpot["context"] == 520 and 0 < tpot["tpot_ms"] < ttft["ttft_ms"] and "does not hold it" in skipped["skipped"]
    assert 0 < whole["cached"] == limited["cached"] <= 100
    assert whole["limit_tokens"] == 256 and limited["limit_tokens"] == 64
    assert by_ratio["step_ratio"] == 50 and by_ratio["step_ms"] == 0 and by_ratio["p99_ratio"] > 0
    assert limited["steps"] > 2 * whole["steps"]
    assert all(0 < run["during_ms"]["p50"] <= run["during_ms"]["max"] for run in (whole, limited))


def test_gaps_are_compared_with_quiet_ones_of_their_time() -> None:
    assert bench_long_context.over_quiet([2.0, 3.0, 3.0, 4.0], before=1.0, behind=3.0) == [2.0, 2.0, 1.5, 1.6]


def test_p99_is_the_nearest_rank() -> None:
    assert bench_long_context.p99([float(value) for value in range(300, 0, -1)]) == 297.0
