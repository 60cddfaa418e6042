"""A speculation method is one row and one class: one that no other file knows works wherever the others do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "made_up_method.py"
CONFIG = """backend: "slipstream"
parameters {{ key: "model" value {{ string_value: "{model}" }} }}
parameters {{ key: "device" value {{ string_value: "cpu" }} }}
parameters {{ key: "memory_bytes" value {{ string_value: "50000000" }} }}
parameters {{ key: "speculative_method" value {{ string_value: "projected" }} }}
parameters {{ key: "projector" value {{ string_value: "../projection" }} }}
"""


@pytest.fixture(scope="module")
def seen(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What `slipstream validate` printed, and all else that the program says of the method."""
    pytest.importorskip("tritonclient.grpc")
    folder = tmp_path_factory.mktemp("made_up")
    (folder / "model").symlink_to(tiny_llama)
    (folder / "projection").mkdir()
    size = json.loads((tiny_llama / "config.json").read_text())["hidden_size"]
    save_file({"weight": torch.eye(size)}, folder / "projection" / "matrix.safetensors")
    (folder / "llm" / "1").mkdir(parents=True)
    (folder / "llm" / "config.pbtxt").write_text(CONFIG.format(model=folder / "model"))
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    *report, found = done.stdout.splitlines()
    return "\n".join(report), json.loads(found)


def test_its_parameters_are_read_and_refused_by_name(seen: tuple[str, dict[str, Any]]) -> None:
    _, found = seen
    assert found["missing"] == "projection='': needed for speculative_method projected: the folder of the matrix"
    assert found["no folder"].endswith("nowhere': no such folder")
    assert found["out of bounds"] == "projection_depth=5: accepted: an integer from 1 to 4"
    assert found["metrics"] == ["projected", "projected"]


def test_validate_plans_it(seen: tuple[str, dict[str, Any]]) -> None:
    report, found = seen
    assert found["validate"] == 0, report
    assert found["drafted"]["weight_bytes"] - found["plain"]["weight_bytes"] == found["matrix_bytes"] > 0
    assert "speculation.methods = projected" in report and "/projection" in report
    assert "ok: this would load" in report


def test_it_drafts_and_the_text_stays(seen: tuple[str, dict[str, Any]]) -> None:
    _, found = seen
    plain, drafted = found["plain"], found["drafted"]
    assert drafted["token_ids"] == plain["token_ids"] and len(plain["token_ids"]) == 24
    assert drafted["counted"]["slipstream_spec_drafted_tokens_total"] > 10
    assert "slipstream_spec_drafted_tokens_total" not in plain["counted"]


def test_it_refuses_requests_of_its_own_accord(seen: tuple[str, dict[str, Any]]) -> None:
    _, found = seen
    assert "projected cannot serve this request: it drafts for greedy requests only" in found["drafted"]["refusal"]
    assert "refusal" not in found["plain"]
