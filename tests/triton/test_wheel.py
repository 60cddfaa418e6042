"""The wheel by itself: installed into an environment of its own, it serves; and it installs the backend elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest
from patience import wait_until
from slipstream_kernels.cuda.toolkit import find_nvcc
from triton_server import free_ports

KERNEL = "sm90_int4_dequantise.cu"
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.version_info >= (3, 13), reason="its Python backend does not run there")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    kernels = KERNEL if find_nvcc() is not None else "none"  # all would take nvcc many minutes
    command = [sys.executable, str(ROOT / "build/make_wheel.py"), "--out", str(out), "--kernels", kernels]
    subprocess.run(command, check=True)
    [made] = out.glob("slipstream-*.whl")
    return made


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`slipstream` of a new environment, whose dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # this tree is not in these
    python = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run([*pip, "--force-reinstall"], check=True)
    return folder / "bin/slipstream"


def run(command: Path, *arguments: str, folder: Path) -> str:
    done = subprocess.run([command, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_is_of_this_platform_and_holds_everything(wheel: Path) -> None:
    assert wheel.name.endswith(f"py3-none-{sysconfig.get_platform().replace('-', '_')}.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"slipstream/native/libtriton_slipstream.so", "slipstream/server/page/index.html"} <= names
    for suffix in ("cu", "cuh", "h", "py"):
        sources = {str(path.relative_to(ROOT / "kernels")) for path in (ROOT / "kernels").rglob(f"*.{suffix}")}
        assert sources <= names, f"not in the wheel: {sorted(sources - names)}"
    prebuilt = {Path(name).name for name in names if name.startswith("slipstream_kernels/prebuilt/")}
    if find_nvcc() is not None:
        assert "toolkit.json" in prebuilt and {name.split("-")[0] for name in prebuilt} > {"sm90_int4_dequantise"}
    assert not [name for name in names if name.startswith(("tests/", "build/"))]


def test_it_puts_the_backend_into_a_server(command: Path, tmp_path: Path) -> None:
    backends = tmp_path / "opt/backends"
    for _ in range(2):  # an upgrade replaces it
        assert str(backends / "slipstream") in run(command, "install-backend", "--to", str(backends), folder=tmp_path)
    folder = backends / "slipstream"
    found = {path.name for path in folder.iterdir()}
    assert found == {"libtriton_slipstream.so", "contract.json", "slipstream-engine"}
    assert str(command.parent / "python") in (folder / "slipstream-engine").read_text()
    assert os.access(folder / "slipstream-engine", os.X_OK)
    (tmp_path / "file").write_text("")
    failed = subprocess.run([command, "install-backend", "--to", tmp_path / "file"], capture_output=True, text=True)
    assert failed.returncode == 1 and "cannot be written" in failed.stderr


def test_it_serves_without_the_source_tree(command: Path, tmp_path: Path) -> None:
    http, grpc, metrics = free_ports(3)
    model = ROOT / "models/slipstream-demo-code"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("PYTHONPATH", None)
    arguments = ["serve", "--model", str(model), "--http-port", str(http), "--grpc-port", str(grpc)]
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(
            [command, *arguments, "--metrics-port", str(metrics)],
            cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        log_file = tmp_path / "log"
        wait_until(lambda: b"ready: llm" in log_file.read_bytes() or server.poll() is not None, "the server", 180.0)
        assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
        start = str(tmp_path / "cache/slipstream/server")
        assert start in (tmp_path / "log").read_text(), "the server is the one that the wheel has set up"
        body = '{"text_input": "def add(a, b):", "max_tokens": 8, "temperature": 0}'
        url = f"http://127.0.0.1:{http}/v2/models/llm/generate"
        with urllib.request.urlopen(url, body.encode(), timeout=60) as answer:
            assert "return" in json.load(answer)["text_output"]
        doctor = subprocess.run([command, "doctor"], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert f"ok    backend        {start}" in doctor.stdout, doctor.stdout + doctor.stderr
    finally:
        server.terminate()
        server.wait(60)
