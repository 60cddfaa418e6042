"""What build/assemble.py makes, and that it does the same for an installed server elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from llm_server import backends_dir

needs_install = pytest.mark.skipif(backends_dir() is None, reason="no install tree: run `make assemble`")


@needs_install
def test_the_tree_holds_both_backends_and_a_server(root: Path) -> None:
    backends = root / "install/backends"
    ours = {path.name for path in (backends / "slipstream").iterdir() if not path.name.startswith(".")}
    assert ours == {"libtriton_slipstream.so", "contract.json", "slipstream-engine"}
    python = {path.name for path in (backends / "python").iterdir()}
    assert {"libtriton_python.so", "triton_python_backend_stub", "triton_python_backend_utils.py"} <= python
    told = subprocess.run([root / "install/tritonserver", "--help"], capture_output=True, text=True)
    assert "--model-repository" in told.stdout + told.stderr


@needs_install
def test_assembling_for_an_installed_server_makes_our_backend_alone(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "install/backends/slipstream", tmp_path / "slipstream")  # what is compiled already
    (tmp_path / "slipstream/contract.json").unlink()
    command = [sys.executable, "build/assemble.py", "--backends-dir", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["slipstream"]
    library = tmp_path / "slipstream/libtriton_slipstream.so"
    assert (tmp_path / "slipstream/contract.json").exists()
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True).stdout
    assert "TRITONBACKEND_ModelInstanceExecute" in symbols


@needs_install
def test_the_contract_declares_every_task(root: Path) -> None:
    contract = json.loads((root / "install/backends/slipstream/contract.json").read_text())
    assert set(contract) == {"generate", "tokenize", "detokenize"}
    inputs = {tensor["name"]: tensor for tensor in contract["generate"]["input"]}
    assert {"text_input", "sampling_parameters", "input_ids", "request_output_len", "stop"} <= set(inputs)
    assert contract["generate"]["decoupled"] is True
    assert contract["generate"]["max_batch_size"] == 0


@needs_install
def test_the_engine_launcher_runs_this_interpreter(root: Path) -> None:
    launcher = root / "install/backends/slipstream/slipstream-engine"
    assert os.access(launcher, os.X_OK)
    told = subprocess.run([launcher, "--help"], capture_output=True, text=True)
    assert told.returncode == 0 and "--socket" in told.stdout, told.stderr


WITHOUT_SERVER = """
import sys, triton_server
triton_server.find_tritonserver = lambda: None
import pytest
sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("is_required", [True, False])
def test_make_test_does_not_pass_without_a_server(root: Path, is_required: bool) -> None:
    """It asks for one, so that a broken setup cannot skip every test of the server; plain pytest skips them."""
    assert "pytest --require-server" in (root / "Makefile").read_text()
    options = ["--require-server"] if is_required else []
    command = [sys.executable, "-c", WITHOUT_SERVER, *options, "tests/triton/test_clients.py", "-k", "test_load_test"]
    environment = {**os.environ, "PYTHONPATH": str(root / "tests/support")}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=400)
    told = done.stdout + done.stderr
    assert (done.returncode != 0) is is_required, told
    assert ("no tritonserver" in told) if is_required else ("1 skipped" in told)
