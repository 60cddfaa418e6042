"""What README.md and docs/ tell a reader to paste gets an answer: curl commands and Python blocks for a server."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from llm_server import backends_dir
from patience import PATIENCE_S

if TYPE_CHECKING:
    from gateway import GatewayProcess
    from llm_server import LlmServer

pytestmark = pytest.mark.skipif(backends_dir() is None, reason="no install tree: run `make assemble`")
ROOT = Path(__file__).resolve().parents[2]
# Another server than the session's: keys, other models, or a state that would disturb other tests.
ELSEWHERE = re.compile(r'ADMIN_KEY|"control"|/safety/|/guarded/|embedding|lora|logits_processors|instance')


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of the fenced blocks."""
    yield from re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def curls(text: str) -> Iterator[str]:
    """Commands of a shell block: a line, and those that a backslash or an open quote adds to it."""
    command = ""
    for line in text.splitlines():
        command = f"{command}\n{line}" if command else line.strip()
        try:
            shlex.split(command.removesuffix("\\"), comments=True)
        except ValueError:
            continue
        if command.endswith("\\"):
            continue
        if command.startswith("curl "):
            yield command
        command = ""


def pasted(kind: str) -> list[object]:
    found = []
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]):
        for language, text in blocks(page):
            if kind == "python":
                commands = [text] if language == "python" and "localhost:" in text else []
            else:
                commands = list(curls(text)) if not language else []
            found += [pytest.param(one, id=page.stem) for one in commands if not ELSEWHERE.search(one)]
    return found


def here(command: str, server: LlmServer, gateway: GatewayProcess) -> str:
    """The command for the servers of the tests."""
    ports = {8000: server.http_url, 8001: server.grpc_url, 8002: server.metrics_url, 9000: gateway.url}
    for port, url in ports.items():
        command = command.replace(f"localhost:{port}", re.sub("^http://|/metrics$", "", url))
    return command


@pytest.mark.parametrize("command", pasted("curl"))
def test_curl(llm_server: LlmServer, gateway: GatewayProcess, command: str) -> None:
    command = here(command, llm_server, gateway).replace("curl ", "curl --fail-with-body ", 1)
    shell = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0 and done.stdout.strip(), done.stdout + done.stderr
    assert not done.stdout.startswith('{"error"'), done.stdout


@pytest.mark.parametrize("program", pasted("python"))
def test_python(llm_server: LlmServer, gateway: GatewayProcess, program: str) -> None:
    pytest.importorskip("openai")
    run = [sys.executable, "-c", here(program, llm_server, gateway)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0 and done.stdout.strip(), done.stdout + done.stderr


def test_the_notebook(llm_server: LlmServer, gateway: GatewayProcess) -> None:
    """Its cells, one after the other, as a program."""
    pytest.importorskip("openai")
    pytest.importorskip("tritonclient")
    cells = json.loads((ROOT / "client_examples/tour.ipynb").read_text("utf-8"))["cells"]
    program = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    run = [sys.executable, "-c", here(program, llm_server, gateway)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.splitlines()
    assert "'llm'" in told[0] and re.search(r"^chosen: (Berlin|Paris|Rome)$", done.stdout, re.MULTILINE)
    assert told[-1].startswith("slipstream_generation_tokens")


def test_they_are_seen() -> None:
    assert len(pasted("curl")) > 10 and len(pasted("python")) > 1
