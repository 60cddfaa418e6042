"""`make demo` and `make serve MODEL=...`, as the Makefile runs them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_cache import COMMIT, make_hub_cache
from llm_server import backends_dir
from patience import PATIENCE_S
from triton_server import free_ports

pytestmark = pytest.mark.skipif(backends_dir() is None, reason="no install tree: run `make assemble`")


def test_demo(root: Path, demo_model: Path) -> None:
    done = subprocess.run([sys.executable, "build/demo.py"], cwd=root, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"-- 48 tokens, .* \d+ tokens/s", done.stdout)) == 4
    assert "all ways gave the same text" in done.stdout


@contextmanager
def serving(root: Path, model: str, environment: dict[str, str] | None = None) -> Iterator[int]:
    """build/serve.py with another checkpoint, until the block ends; gives its HTTP port once it is ready."""
    http, grpc, metrics = free_ports(3)
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    command = [sys.executable, "build/serve.py", "--model", model, *ports]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=root, env=environment, **pipes) as server:
        try:
            wait_ready(server, http)
            yield http
        finally:
            server.send_signal(signal.SIGTERM)
            told, _ = server.communicate(timeout=2 * PATIENCE_S)
    assert server.returncode == 0
    assert f"curl -s  http://127.0.0.1:{http}/v2/models/llm/generate" in told


def check_served(port: int, checkpoint: Path) -> None:
    """`llm` has that checkpoint, and all three steps of the ensemble work."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/llm/config") as reply:
        assert json.load(reply)["parameters"]["model"]["string_value"] == str(checkpoint)
    body = json.dumps({"text_input": "import os\n", "max_tokens": 4}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/ensemble/generate", data=body) as reply:
        assert json.load(reply)["text_output"].startswith("import os\n")


def test_serve_another_checkpoint(root: Path, demo_model: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(demo_model, tmp_path / "another")
    with serving(root, str(checkpoint)) as port:
        check_served(port, checkpoint)


def test_serve_a_hub_id(root: Path, demo_model: Path, tmp_path: Path) -> None:
    environment = make_hub_cache(tmp_path, "org/name", demo_model)
    with serving(root, "org/name", environment) as port:
        check_served(port, tmp_path / "hub/models--org--name/snapshots" / COMMIT)


def test_serving_a_model_that_is_nowhere_says_so(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "build/serve.py", "--model", "org/nowhere"]
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.returncode == 1 and done.stderr.startswith("model='org/nowhere': no such folder"), done.stderr


def wait_ready(server: subprocess.Popen[str], port: int) -> None:
    deadline = time.monotonic() + 2 * PATIENCE_S
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
