"""Every client example as a user runs it: alone, against the real server."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from llm_server import ROOT, LlmServer

EXAMPLES = sorted(path.name for path in (ROOT / "client_examples").glob("*.py"))
PROMPT = "def fibonacci(n):\n"


def run(name: str, *arguments: str, folder: Path = ROOT / "client_examples", **options: object) -> str:
    command = [sys.executable, str(folder / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs_alone(name: str, tmp_path: Path) -> None:
    """From another folder, without its neighbours; and it says what it takes."""
    shutil.copy(ROOT / "client_examples" / name, tmp_path)
    told = run(name, "--help", folder=tmp_path, cwd=tmp_path)
    assert "--url" in told
    assert ast.get_docstring(ast.parse((tmp_path / name).read_text()))


def test_generate(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    for protocol, url in (("grpc", llm_server.grpc_url), ("http", llm_server.http_url)):
        told = run("generate.py", "--url", url, "--protocol", protocol, "--prompt", PROMPT, "--max-tokens", "24")
        assert told == PROMPT + greedy(PROMPT) + "\n"


@pytest.mark.parametrize("name", ["stream.py", "http_stream.py", "ensemble.py"])
def test_stream(llm_server: LlmServer, greedy: Callable[..., str], name: str) -> None:
    url = llm_server.http_url if name == "http_stream.py" else llm_server.grpc_url
    assert run(name, "--url", url, "--prompt", PROMPT, "--max-tokens", "24") == greedy(PROMPT) + "\n"


@pytest.mark.parametrize("how", [[], ["--stop"], ["--stop", "--model", "ensemble"]])
def test_cancel(llm_server: LlmServer, how: list[str]) -> None:
    before = llm_server.metric("slipstream_cancellations_total")
    told = run("cancel.py", "--url", llm_server.grpc_url, "--max-tokens", "400", *how)
    figures = json.loads(told.splitlines()[-1])
    assert figures["responses_before"] == 8 and figures["responses_after"] < 200
    llm_server.wait_idle()
    assert llm_server.metric("slipstream_cancellations_total") == before + 1


def test_chat(llm_server: LlmServer) -> None:
    lines = "def add(a, b):\n    return a\n\n"
    told = run("chat.py", "--url", llm_server.grpc_url, "--code", "--max-tokens", "12", input=lines)
    assert told.count(">>>") == 3 and len(told) > 20


def test_load_test(llm_server: LlmServer) -> None:
    told = run("load_test.py", "--url", llm_server.grpc_url, "--streams", "4", "--requests", "8", "--max-tokens", "8")
    assert "8 requests, 64 tokens" in told
    assert re.search(r"TTFT: p50 +[\d.]+ ms", told) and re.search(r"ITL: p50 +[\d.]+ ms", told)
