"""schemathesis against the gateway's OpenAPI schema: no answer of 500, none outside of what the schema says.

The same requests in every run, however fast the machine: a number of examples of one seed, and no time. Other ones:

    SLIPSTREAM_FUZZ="7 2000" pytest tests/server/test_fuzz.py       # a seed, and the most examples per operation
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gateway import GatewayProcess
from llm_server import LlmServer

SEED, EXAMPLES = os.environ.get("SLIPSTREAM_FUZZ", "1 15").split()
# every value at the border of its type, of all but the four large bodies (thousands more); then random ones of all
BORDERS = ["--phases", "coverage"]
if "SLIPSTREAM_FUZZ" not in os.environ:
    BORDERS += ["--exclude-path-regex", "completions|responses|messages"]
PHASES = ((BORDERS, 100), (["--phases", "fuzzing", "--max-examples", EXAMPLES], 50))
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
    command += ["--seed", SEED, "--no-color", "--request-timeout", "60", "--generation-database", "none"]
    with llm_server.variant("fuzzed", {"load_format": "null", "max_model_len": 64, "num_blocks": 256}):
        for phase, least in PHASES:
            done = subprocess.run([*command, *phase], capture_output=True, text=True, cwd=tmp_path)
            assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
            tried = re.search(r"(\d+) generated, \1 passed", done.stdout)
            assert tried is not None and int(tried[1]) >= least, done.stdout[-2000:]
        llm_server.wait_idle("fuzzed")
    assert gateway.get("/ready")[0] == 200
