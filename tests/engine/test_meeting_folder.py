"""Where the ranks of a machine meet: what a killed engine leaves there."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from slipstream.engine.meeting_folder import MeetingFolder


def test_the_folder_of_an_engine_that_was_killed_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next one, which leaves alone that of an engine that lives, and one that is just being made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = f"""
import os, sys, tempfile
sys.path[:] = {sys.path!r}
from slipstream.engine.meeting_folder import MeetingFolder
tempfile.tempdir = {str(tmp_path)!r}
folder = MeetingFolder()
os._exit(0)
"""
    living = MeetingFolder()
    being_made = Path(tempfile.mkdtemp(prefix="slipstream-ranks-"))
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(list(tmp_path.iterdir())) == 3
    last = MeetingFolder()
    places = [Path(one.store_path).parent for one in (living, last)]
    assert sorted(tmp_path.iterdir()) == sorted([being_made, *places])
    for one in (living, last):
        one.close()
    assert list(tmp_path.iterdir()) == [being_made]
