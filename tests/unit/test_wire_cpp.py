"""The C++ end of the protocol (backend/triton/wire.cc) against the same golden bytes as wire.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from golden_frames import FRAMES, GOLDEN_FILE, METRICS, OUTPUTS, read_golden
from slipstream.core.config import SchedulerConfig, ServingConfig
from slipstream.protocol import wire


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory, root: Path) -> list[str]:
    """What wire_golden.cc prints."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("wire") / "wire_golden"
    sources = [root / "tests" / "unit" / "wire_golden.cc", root / "backend" / "triton" / "wire.cc"]
    flags = ["-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover"]
    include = f"-I{root / 'backend' / 'triton'}"
    subprocess.run([compiler, *flags, include, *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([str(program), str(GOLDEN_FILE)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", ["config", "request", "cancel", "drain"])
def test_the_backend_encodes_the_golden_bytes(lines: list[str], name: str) -> None:
    assert f"{name} {read_golden()[name].hex()}" in lines


@pytest.mark.parametrize("name", ["hello", "ready", "load_failed", "responses", "metrics", "drained"])
def test_headers_are_decoded(lines: list[str], name: str) -> None:
    kind = wire.FrameType[name.upper()]
    assert f"header {name} {kind:d} {len(FRAMES[name]) - wire.FRAME_HEADER_BYTES}" in lines


def test_hello_needs_the_token(lines: list[str]) -> None:
    assert "hello 1 0" in lines


def test_ready_is_decoded(lines: list[str]) -> None:
    assert [line for line in lines if line.startswith("output ")] == [f"output {o.name} {o.dtype:d}" for o in OUTPUTS]
    expected = []
    for metric in METRICS:
        more = [f"{name}={value}" for name, value in metric.labels] + [f"{bound:g}" for bound in metric.bounds]
        expected.append(" ".join(["metric", metric.family, f"{metric.kind:d}", metric.help, *more]))
    assert [line for line in lines if line.startswith("metric ")] == expected


def test_responses_are_decoded(lines: list[str]) -> None:
    assert [line for line in lines if line.startswith("response ")] == [
        "response 1 flags 0 | 0 1 : 10 bytes",
        "response 2 flags 1 | 0 1 : 9 bytes",
        "response 3 flags 1 | 0 1 : 5 bytes | 1 2 3 : 24 bytes | 1 : 4 bytes",
        "response 4 flags 3 error 3 max_tokens: -1 is not positive",
        "response 5 flags 5",
    ]


def test_damaged_input_is_refused(lines: list[str]) -> None:
    size = len(FRAMES["ready"]) - wire.FRAME_HEADER_BYTES
    assert f"refused ready {size + 1} of {size + 2}" in lines  # all but the undamaged one
    assert len([line for line in lines if line.startswith("bad header: ")]) == 3


@pytest.mark.parametrize(
    ("name", "most", "given"),
    [("count8", 255, 256), ("count16", 65535, 65536), ("count32", 2**32 - 1, 2**32), ("str", 65535, 65536)],
)
def test_no_count_is_cut_to_its_field(lines: list[str], name: str, most: int, given: int) -> None:
    assert f"overflow {name}: a frame's field holds at most {most}, got {given}" in lines


def test_both_ends_have_the_same_default_drain_timeout(root: Path) -> None:
    found = re.search(r"kDefaultSeconds = ([\d.]+)", (root / "backend" / "triton" / "model.cc").read_text())
    assert found and float(found[1]) == ServingConfig().drain_timeout_s


def test_both_ends_have_the_same_default_limits_of_requests(root: Path) -> None:
    model = (root / "backend" / "triton" / "model.cc").read_text()
    found = re.search(r"kDefaultRunning = (\d+), kDefaultWaiting = (\d+)", model)
    defaults = SchedulerConfig()
    assert found and [int(found[1]), int(found[2])] == [defaults.max_num_seqs, defaults.max_waiting_requests]
