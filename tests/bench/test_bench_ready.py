"""The bench of an engine process's start: its line and medians, beside a log of any size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bench_ready


def test_a_start_beside_a_long_log(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        bench_ready, "ENGINE", f"import sys; sys.stderr.write('a warning\\n' * 20000); {bench_ready.ENGINE}"
    )
    options = ["--model", str(demo_model), "--set", "device=cpu", "--set", "num_blocks=64", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_ready.py", *options])
    bench_ready.main()
    first, second, ready, cpu = capsys.readouterr().out.splitlines()
    for line in map(json.loads, (first, second)):
        assert line["ready_s"] > 0 and line["cpu_s"] > 0 and "weights" in line["phases"]
    assert ready.startswith("ready_s: median") and cpu.startswith("cpu_s: median")


def test_the_first_start_alone_has_no_median(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_ready.py", "--shape", "tiny", "--repeats", "0"])
    with pytest.raises(SystemExit):
        bench_ready.main()
    assert "--repeats: 0, accepted: 1 or more" in capsys.readouterr().err
