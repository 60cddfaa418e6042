"""`make demo` and `make serve MODEL=...`, as the Makefile runs them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from llm_server import backends_dir
from triton_server import free_ports

pytestmark = pytest.mark.skipif(backends_dir() is None, reason="no install tree: run `make assemble`")


def test_demo(root: Path, demo_model: Path) -> None:
    done = subprocess.run([sys.executable, "build/demo.py"], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"-- 48 tokens, .* \d+ tokens/s", done.stdout)) == 4
    assert "all ways gave the same text" in done.stdout


def test_serve_another_checkpoint(root: Path, demo_model: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(demo_model, tmp_path / "another")
    http, grpc, metrics = free_ports(3)
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    command = [sys.executable, "build/serve.py", "--model", str(checkpoint), *ports]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            wait_ready(server, http)
            with urllib.request.urlopen(f"http://127.0.0.1:{http}/v2/models/llm/config") as reply:
                assert json.load(reply)["parameters"]["model"]["string_value"] == str(checkpoint)
            body = json.dumps({"text_input": "import os\n", "max_tokens": 4}).encode()
            with urllib.request.urlopen(f"http://127.0.0.1:{http}/v2/models/ensemble/generate", data=body) as reply:
                assert json.load(reply)["text_output"].startswith("import os\n")
        finally:
            server.send_signal(signal.SIGTERM)
            told, _ = server.communicate(timeout=60)
    assert server.returncode == 0
    assert f"curl -s  http://127.0.0.1:{http}/v2/models/llm/generate" in told


def wait_ready(server: subprocess.Popen[str], port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert server.poll() is None and time.monotonic() < deadline, "the server did not become ready"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)


@pytest.mark.parametrize("target", ["demo", "serve", "test", "lint", "clean", "setup", "assemble"])
def test_make_knows_the_target(root: Path, target: str) -> None:
    done = subprocess.run(["make", "-n", target, "MODEL=x"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ci_runs_exactly_make_test(root: Path) -> None:
    commands = [line for line in (root / ".ci/run").read_text().splitlines() if line.startswith("make ")]
    assert commands == ["make test"]
