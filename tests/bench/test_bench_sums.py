"""The benchmark of sums over ranks still runs, on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_benchmark_of_sums_runs(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "sums.jsonl"
    options = ["--ranks", "2", "--device", "cpu", "--kib", "1,64", "--out", str(out)]
    subprocess.run([sys.executable, root / "tests/bench/bench_sums.py", *options], check=True, timeout=200)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(one["way"], one["kib"]) for one in found] == [
        ("engine", 1), ("engine", 64), ("library", 1), ("library", 64),
    ]  # fmt: skip
    assert all(one["us"] > 0 for one in found)
