"""The serving benchmark still runs, and every response of 64 streams arrives."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_the_serving_benchmark_runs(root: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "tests" / "bench"))
    import bench_serving

    try:
        [row] = bench_serving.run(
            bench_serving.Load([64], num_tokens=25, repeats=1)
        )  # asserts the number of messages itself
    except bench_serving.MissingTool as missing:
        pytest.skip(str(missing))
    assert row["unfinished"] == 0 and row["engine_us"] >= 0
