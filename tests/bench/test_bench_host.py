"""The bench of the host's time steps the real engine and gives a figure for each batch."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from bench_host import HostBench


def test_a_step_has_a_time_and_does_its_work() -> None:
    bench = HostBench(8)
    assert bench.engine.config.scheduler.overlap_scheduling == "on"
    assert all(bench.decode(batch, num_steps=3, repeats=2) > 0.0 for batch in (1, 8))
    assert not bench.engine.has_work and bench.engine.error is None
