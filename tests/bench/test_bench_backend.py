"""The backend's benchmark still runs, and under its load client every response arrives."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_server import find_tritonserver


def test_the_backend_benchmark_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_tritonserver() is None:
        pytest.skip("no tritonserver: nvidia-pytriton is not installed")
    monkeypatch.syspath_prepend(str(root / "tests" / "bench"))
    import bench_backend

    try:
        [row] = bench_backend.run(
            bench_backend.Load([16], num_tokens=50, repeats=1)
        )  # asserts the number of messages itself
    except bench_backend.MissingTool as missing:
        pytest.skip(str(missing))
    assert row["unfinished"] == 0 and row["server_us"] > 0
