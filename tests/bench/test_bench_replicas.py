"""The benchmark of replicas still runs, and the turns of conversations find their prefixes again."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_the_benchmark_of_replicas_runs(root: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system prompt is less than a block, so conversations share none.

    If they shared one, a conversation that starts while no request runs would go to the replica that has it. On a slow
    machine requests may never overlap, and the other replica would get nothing.
    """
    monkeypatch.syspath_prepend(str(root / "tests" / "bench"))
    import bench_replicas

    block = bench_replicas.BLOCK_SIZE
    load = bench_replicas.Load(
        conversations=6, concurrency=3, turns=4, system=block // 2, user=(block, 4 * block), answer=8
    )
    try:
        found = bench_replicas.measure(load, num_replicas=2, slack=4, num_blocks=1024)
    except bench_replicas.MissingTool as missing:
        pytest.skip(str(missing))
    assert found.hit_rate > 0.5, "of turns 2 to 4 nearly all but what is new"
    assert min(found.made_by_replica) > 0, "a replica that had no request yet is the best for a new conversation"
