"""A backend directory with the real library and the stand-in engine, and model repositories to load from it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _tensor(name: str, data_type: str, **more: object) -> dict[str, object]:
    return {"name": name, "data_type": f"TYPE_{data_type}", "dims": [1], **more}


_INPUTS = [
    _tensor("text_input", "STRING", optional=True),
    _tensor("max_tokens", "INT32", optional=True),
    _tensor("stream", "BOOL", optional=True),
    _tensor("temperature", "FP32", optional=True),
]
_OUTPUTS = [
    _tensor("text_output", "STRING"),
    _tensor("num_output_tokens", "INT32"),
    _tensor("request_handle", "UINT64"),
    _tensor("seen", "STRING"),
]
CONTRACT = {
    "generate": {"input": _INPUTS, "output": _OUTPUTS, "max_batch_size": 0, "decoupled": True},
    "tokenize": {"input": _INPUTS[:1], "output": _OUTPUTS, "max_batch_size": 0, "decoupled": False},
    "detokenize": {
        "input": [_INPUTS[0], _tensor("REQUEST_HANDLE", "UINT64", optional=True)],
        "output": _OUTPUTS,
        "max_batch_size": 0,
        "decoupled": False,
    },
}


def make_backend_dir(library: Path, path: Path) -> Path:
    """<path>/slipstream with the library, contract.json and a launcher of fake_engine.py.  Returns path."""
    backend = path / "slipstream"
    backend.mkdir(parents=True)
    (backend / library.name).symlink_to(library)
    (backend / "contract.json").write_text(json.dumps(CONTRACT, indent=1))
    launcher = backend / "slipstream-engine"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT}/tests/support/fake_engine.py" "$@"\n')
    launcher.chmod(0o755)
    return path


def compile_library(out_dir: Path) -> Path:
    """The backend's library, compiled (or found compiled) by build/compile_backend.py."""
    command = [sys.executable, str(ROOT / "build" / "compile_backend.py"), "--out", str(out_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def add_model(repository: Path, name: str, parameters: Mapping[str, str] | None = None, extra: str = "") -> Path:
    """A model directory as a user writes it: name, backend and parameters."""
    model = repository / name
    (model / "1").mkdir(parents=True)
    entries = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
        for key, value in {"fake": "1", **(parameters or {})}.items()
    )
    (model / "config.pbtxt").write_text(f'name: "{name}"\nbackend: "slipstream"\n{entries}{extra}')
    return model


def add_ensemble(repository: Path, first: str, output: str, second_input: str) -> None:
    """The model `ensemble`: `first`, whose output is the input of `detok`, which says what the client gets."""
    model = repository / "ensemble"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(f"""platform: "ensemble"
input {{ name: "text_input" data_type: TYPE_STRING dims: [1] }}
output {{ name: "text_output" data_type: TYPE_STRING dims: [1] }}
ensemble_scheduling {{
  step {{ model_name: "{first}" model_version: -1
    input_map {{ key: "text_input" value: "text_input" }}
    output_map {{ key: "{output}" value: "piece" }}
    output_map {{ key: "request_handle" value: "handle" }} }}
  step {{ model_name: "detok" model_version: -1
    input_map {{ key: "{second_input}" value: "piece" }}
    input_map {{ key: "REQUEST_HANDLE" value: "handle" }}
    output_map {{ key: "text_output" value: "text_output" }} }}
}}
""")
