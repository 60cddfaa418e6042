"""An engine process whose first rank waits for ever, as for a kernel on a GPU that waits for a rank which is lost.

Arguments: the folder in which it makes a file `waits`, where it waits, and those of slipstream-engine.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from failing_rank import start_of
from slipstream.core.errors import EngineError
from slipstream.engine import executor, main, rank_processes, ranks
from slipstream.engine.load_watch import LoadWatch
from slipstream.worker.model_runner import ModelRunner


def stuck(folder: Path) -> NoReturn:
    (folder / "waits").touch()
    threading.Event().wait()
    raise AssertionError


def waits_in_warm_up(folder: Path, number: int) -> None:
    """In the first one, which is that of the load, or the second, of a wake."""
    warm_up, seen = ModelRunner._warm_up, [0]

    def wait(self: ModelRunner, *arguments: object) -> None:
        seen[0] += 1
        if seen[0] == number:
            stuck(folder)
        warm_up(self, *arguments)  # type: ignore[arg-type]

    ModelRunner._warm_up = wait  # type: ignore[method-assign]


def waits_for_a_rank_that_fails(folder: Path) -> None:
    rank_processes._START = start_of(1)
    executor.ModelWorker = lambda *_: stuck(folder)  # type: ignore[assignment,misc]


def fails_and_waits(folder: Path) -> None:
    """For a device, while it gives back what it has."""

    def fail(*_: object) -> NoReturn:
        raise EngineError("no memory for the first rank")

    executor.ModelWorker = fail  # type: ignore[assignment,misc]
    ranks.leave = lambda device: stuck(folder)


def is_limited(folder: Path) -> None:
    """To less than the parameter may say."""
    ranks.LoadWatch = lambda limit_s: LoadWatch(3.0)  # type: ignore[assignment,misc]
    waits_in_warm_up(folder, 1)


PLACES: dict[str, Callable[[Path], None]] = {
    "load": lambda folder: waits_in_warm_up(folder, 1),
    "wake": lambda folder: waits_in_warm_up(folder, 2),
    "failing rank": waits_for_a_rank_that_fails,
    "end": fails_and_waits,
    "stuck first rank": is_limited,
}

if __name__ == "__main__":
    folder, place = sys.argv.pop(1), sys.argv.pop(1)
    PLACES[place](Path(folder))
    main.main()
