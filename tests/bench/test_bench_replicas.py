"""The benchmark of replicas still runs, and the turns of conversations find their prefixes again."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_the_benchmark_of_replicas_runs(root: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "tests" / "bench"))
    import bench_replicas

    load = bench_replicas.Load(conversations=6, concurrency=3, turns=4, answer=8)
    try:
        found = bench_replicas.measure(load, num_replicas=2, slack=4, num_blocks=1024)
    except bench_replicas.MissingTool as missing:
        pytest.skip(str(missing))
    assert found.hit_rate > 0.6, "of turns 2 to 4 nearly all but what is new"
    assert min(found.made_by_replica) > 0
