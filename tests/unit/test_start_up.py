"""Phases of a start: each its own time, the first since the process began."""

from __future__ import annotations

import logging
import re
import time

import pytest
from slipstream.core.start_up import StartUp


def test_phases_add_up(caplog: pytest.LogCaptureFixture) -> None:
    start = time.monotonic()
    phases = StartUp()
    time.sleep(0.02)
    phases.finish("plan")
    phases.finish("weights")
    assert list(phases.seconds) == ["spawn and imports", "plan", "weights"]
    assert phases.seconds["spawn and imports"] > 0.01, "this process did not begin just now"
    assert 0.02 <= phases.seconds["plan"] + phases.seconds["weights"] <= time.monotonic() - start
    with caplog.at_level(logging.INFO):
        phases.log()
    assert "spawn and imports" in caplog.text and re.search(r"plan \d", caplog.text)
