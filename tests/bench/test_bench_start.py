"""The bench of starts: a process of its own for each shape, with the phases of its start; what failed is said."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


def test_the_phases_of_a_start(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "tests/bench"))
    import bench_start

    out = tmp_path / "start.jsonl"
    options = "--shapes tiny --max-num-seqs 2 --max-model-len 128 --max-num-batched-tokens 64"
    options += f" --set device=cpu --set memory_bytes=50000000 --out {out}"
    monkeypatch.setattr(sys, "argv", ["bench_start.py", *options.split()])
    bench_start.main()
    record = json.loads(out.read_text())
    assert record["shape"] == "tiny" and "failed" not in record
    assert record["phases"]["weights"] >= 0 and record["process_s"] >= record["ready_s"] > 0
    monkeypatch.setattr(sys, "argv", ["bench_start.py", *options.replace("device=cpu", "device=none").split()])
    bench_start.main()
    assert "device" in json.loads(out.read_text().splitlines()[-1])["failed"][0]


def test_an_unknown_shape_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(root / "tests/bench"))
    import bench_start

    monkeypatch.setattr(sys, "argv", ["bench_start.py", "--shapes", "tiny,tinny"])
    with pytest.raises(SystemExit):
        bench_start.main()
    assert "--shapes: tinny; accepted: llama3-8b" in capsys.readouterr().err
