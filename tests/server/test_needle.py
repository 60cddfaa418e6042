"""build/needle.py against the real server: gRPC and the gateway give the same texts, and a prefix hit repeats them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build"))
import needle

if TYPE_CHECKING:
    from gateway import GatewayProcess
    from llm_server import LlmServer


def test_both_ways_in(
    llm_server: LlmServer, gateway: GatewayProcess, demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--tokenizer", str(demo_model), "--no-chat", "--lengths", "192", "--depths", "0,100"]
    grpc, http = tmp_path / "grpc", tmp_path / "http"
    assert needle.main([*asked, "--url", llm_server.grpc_url, "--again", "--output", str(grpc)]) == 0
    found = json.loads((grpc / "needle.json").read_text())["results"]
    assert len(found) == 2 and all(one["answer"] and one["same_again"] for one in found)
    assert (grpc / "needle.png").stat().st_size > 1000 and "| 192 |" in capsys.readouterr().out
    same = ["--openai", f"{gateway.url}/v1", "--same-as", str(grpc / "needle.json"), "--output", str(http)]
    assert needle.main([*asked, *same]) == 0
    about = json.loads((grpc / "needle.json").read_text())
    other = {**about, "results": [{**one, "answer": "another text"} for one in found]}
    (grpc / "needle.json").write_text(json.dumps(other))
    assert needle.main([*asked, *same]) == 1
    assert "other texts" in capsys.readouterr().out
