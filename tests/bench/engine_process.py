"""A program in a process group of its own, so that nothing of it stays on the GPU: an engine's own processes outlive
the one that started them when that one is killed or breaks."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_LOOK_S = 0.2


def run_program(
    command: list[str], log: Path, timeout_s: float, is_over: threading.Event, environment: Mapping[str, str] | None
) -> str:
    """Why it failed; "" if it did not. Its output goes to the log. Ends it when time is over, or is_over is set."""
    deadline = time.monotonic() + timeout_s
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        while not is_over.is_set():
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(_LOOK_S)
                return f"exit code {code}, see {log.name}" if code else ""
            if time.monotonic() > deadline:
                return f"not done after {timeout_s:g} s"
        return "the run was ended"
    finally:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its own session, so its number is the group's
    process.wait()
