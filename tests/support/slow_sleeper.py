"""The process of a rank whose sleep takes its time, and leaves a file when it has ended."""

from __future__ import annotations

import time
from pathlib import Path

from slipstream.engine import rank_main
from slipstream.worker.worker import ModelWorker


def start_of(folder: Path, seconds: float) -> str:
    """The code of rank_processes._START. A rank's file has its number for a name."""
    code = f"from slow_sleeper import main; main({str(folder)!r}, {seconds})"
    return f"import sys; sys.path[:] = {{path!r}}; {code}"


def main(folder: str, seconds: float) -> None:
    sleep = ModelWorker.sleep

    def slowly(worker: ModelWorker, level: int) -> None:
        time.sleep(seconds)
        sleep(worker, level)
        (Path(folder) / str(worker._hardware.parallel.number)).touch()

    ModelWorker.sleep = slowly  # type: ignore[method-assign]
    rank_main.main()
