"""The gateway's benchmark still runs; docs/measurements has its figures. Its direct way is test_bench_serving.py's."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the gateway's packages are not installed")


def test_the_gateway_benchmark_runs(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(root / "tests" / "bench"))
    import bench_gateway
    import bench_serving
    from gateway import GatewayProcess
    from llm_server import backends_dir, missing_server
    from triton_server import TritonServer

    if missing_server():
        pytest.skip(missing_server())
    load = bench_gateway.Load(4, num_tokens=20, repeats=1, least_tokens=0)
    with (
        TritonServer(bench_serving.write_repository(tmp_path / "repository"), backends_dir()) as server,
        GatewayProcess(server.grpc_url, ["--max-events-per-s", "0"]) as gateway,
    ):
        ways = {"gateway": lambda: bench_gateway.measure_gateway(server, gateway, load)}
        [row] = bench_gateway.take_turns(ways, load.repeats)
    assert row["tokens_per_s"] > 0 and row["tokens_per_event"] == pytest.approx(1, rel=0.2) and row["ratio"] == 1
