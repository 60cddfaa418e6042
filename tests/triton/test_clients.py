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
from patience import PATIENCE_S

EXAMPLES = sorted(path.name for path in (ROOT / "client_examples").glob("*.py"))
PROMPT = "def fibonacci(n):\n"


def run(name: str, *arguments: str, folder: Path = ROOT / "client_examples", **options: object) -> str:
    command = [sys.executable, str(folder / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs_alone(name: str, tmp_path: Path) -> None:
    """From another folder, without its neighbours; and it says what it takes."""
    shutil.copy(ROOT / "client_examples" / name, tmp_path)
    told = run(name, "--help", folder=tmp_path, cwd=tmp_path)
    assert "--url" in told
    assert ast.get_docstring(ast.parse((tmp_path / name).read_text()))


@pytest.mark.parametrize("name", EXAMPLES)
def test_without_a_server_it_says_so(name: str) -> None:
    address = "http://127.0.0.1:1" if name == "openai_stream.py" else "127.0.0.1:1"
    command = [sys.executable, str(ROOT / "client_examples" / name), "--url", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, input="hello\n")
    assert done.returncode == 1 and "refused" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_refusal_is_shown_in_the_servers_words(llm_server: LlmServer) -> None:
    command = [sys.executable, str(ROOT / "client_examples/generate.py"), "--url", llm_server.http_url]
    done = subprocess.run([*command, "--protocol", "http", "--max-tokens", "-1"], capture_output=True, text=True)
    assert done.returncode == 1 and "the server says" in done.stderr and "max_tokens: got -1" in done.stderr


def test_generate(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    for protocol, url in (("grpc", llm_server.grpc_url), ("http", llm_server.http_url)):
        told = run("generate.py", "--url", url, "--protocol", protocol, "--prompt", PROMPT, "--max-tokens", "24")
        assert told == PROMPT + greedy(PROMPT) + "\n"


def test_tokens_are_counted_by_the_server(llm_server: LlmServer, greedy: Callable[..., str], monkeypatch) -> None:
    """Those of the text and of the stop string after it, not the most that were allowed; `make demo` shows them."""
    monkeypatch.syspath_prepend(str(ROOT / "client_examples"))
    import generate

    word = greedy(PROMPT)[8:12]
    sampling = {"max_tokens": 24, "temperature": 0.0, "stop_words": [word], "exclude_input_in_output": True}
    told = [
        generate.generate_http(llm_server.http_url, "llm", PROMPT, sampling),
        generate.generate_grpc(llm_server.grpc_url, "llm", PROMPT, sampling),
    ]
    assert told[0] == told[1]
    text, num_tokens = told[0]
    assert text == greedy(PROMPT).partition(word)[0]
    assert greedy(PROMPT, num_tokens).startswith(text + word) and not greedy(PROMPT, num_tokens - 1).startswith(
        text + word
    )


@pytest.mark.parametrize("name", ["stream.py", "http_stream.py", "ensemble.py"])
def test_stream(llm_server: LlmServer, greedy: Callable[..., str], name: str) -> None:
    url = llm_server.http_url if name == "http_stream.py" else llm_server.grpc_url
    assert run(name, "--url", url, "--prompt", PROMPT, "--max-tokens", "24") == greedy(PROMPT) + "\n"


@pytest.mark.parametrize("how", [[], ["--stop"], ["--stop", "--model", "ensemble"]])
def test_cancel(llm_server: LlmServer, how: list[str]) -> None:
    before = llm_server.settled("slipstream_cancellations_total")
    told = run("cancel.py", "--url", llm_server.grpc_url, "--max-tokens", "1500", *how)
    figures = json.loads(told.splitlines()[-1])
    assert figures["responses_before"] == 8 and figures["responses_after"] < 1000
    llm_server.wait_counted(before + 1, "slipstream_cancellations_total")


def test_chat(llm_server: LlmServer) -> None:
    lines = "def add(a, b):\n    return a\n\n"
    told = run("chat.py", "--url", llm_server.grpc_url, "--code", "--max-tokens", "12", input=lines)
    assert told.count(">>>") == 3 and len(told) > 20


def test_load_test(llm_server: LlmServer) -> None:
    told = run("load_test.py", "--url", llm_server.grpc_url, "--streams", "4", "--requests", "8", "--max-tokens", "8")
    assert "8 requests, 64 tokens" in told
    assert re.search(r"TTFT: p50 +[\d.]+ ms", told) and re.search(r"ITL: p50 +[\d.]+ ms", told)
