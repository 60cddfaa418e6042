"""The gateway's benchmark still runs; its figures are for docs/LOG.md."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the gateway's packages are not installed")


def test_the_gateway_benchmark_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "tests" / "bench"))
    import bench_gateway

    try:
        rows = bench_gateway.run(bench_gateway.Load(4, num_tokens=20, repeats=1, least_tokens=0))
    except bench_gateway.MissingTool as missing:
        pytest.skip(str(missing))
    direct, single, shared = rows
    assert direct["ratio"] == 1 and all(row["tokens_per_s"] > 0 for row in rows)
    assert single["tokens_per_event"] == pytest.approx(1, rel=0.2) and shared["gateway_us"] >= 0
