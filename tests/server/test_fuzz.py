"""schemathesis against the gateway's OpenAPI schema: no answer of 500, none outside of what the schema says."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from gateway import GatewayProcess
from llm_server import LlmServer

SECONDS = 5
CHECKS = ",".join(
    (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
    )
)


def test_the_schema_is_kept(gateway: GatewayProcess, llm_server: LlmServer, tmp_path: Path) -> None:
    """Requests reach an engine whose model costs nothing and whose texts are short."""
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed (it needs Python 3.11)")
    schema = json.loads(gateway.get("/openapi.json")[1])
    for name in ("ChatRequest", "CompletionRequest"):
        schema["components"]["schemas"][name]["properties"]["model"] = {"enum": ["fuzzed"]}
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(schema))
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(path), "--url", gateway.url, "--checks", CHECKS]
    command += ["--phases", "coverage,fuzzing", "--max-time", str(SECONDS), "--seed", "1", "--no-color"]
    command += ["--request-timeout", "20", "--generation-database", "none"]
    with llm_server.variant("fuzzed", {"load_format": "null", "max_model_len": 64, "num_blocks": 256}):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        llm_server.wait_idle("fuzzed")
    assert gateway.get("/ready")[0] == 200
