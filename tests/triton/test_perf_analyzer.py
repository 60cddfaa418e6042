"""perf_analyzer, the load generator of Triton's own, finds nothing to complain of; as docs/perf.md runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from llm_server import LlmServer


@pytest.fixture(scope="module")
def perf_analyzer(root: Path) -> Path:
    """The binary from PyPI; skips with the reason where it cannot be had."""
    command = [sys.executable, str(root / "build/fetch_perf_analyzer.py")]
    try:
        fetched = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("perf_analyzer's wheel did not arrive within two minutes")
    if fetched.returncode:
        pytest.skip(fetched.stderr.strip())
    path = Path(fetched.stdout.strip())
    started = subprocess.run([path, "--version"], capture_output=True, text=True)
    if started.returncode:
        pytest.skip(f"perf_analyzer does not start here: {started.stderr.strip()}")
    return path


def test_streaming_over_grpc(llm_server: LlmServer, perf_analyzer: Path, tmp_path: Path) -> None:
    request = {"text_input": ["def add(a, b):\n"], "stream": [True], "max_tokens": [8]}
    request |= {"temperature": [0.0], "ignore_eos": [True]}  # a drawn end of the text would make an answer shorter
    (tmp_path / "input.json").write_text(json.dumps({"data": [request]}))
    command = [perf_analyzer, "-m", "llm", "-u", llm_server.grpc_url, "-i", "grpc", "--streaming", "--async"]
    command += ["--input-data", "input.json", "--concurrency-range", "2", "--request-count", "10"]
    command += ["--profile-export-file", "profile.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Response Throughput" in done.stdout
    requests = json.loads((tmp_path / "profile.json").read_text())["experiments"][0]["requests"]
    assert len(requests) >= 10
    for measured in requests:  # one time stamp per token, one more when an empty final response follows
        assert 8 <= len(measured["response_timestamps"]) <= 9, measured
