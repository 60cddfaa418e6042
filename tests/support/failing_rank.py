"""The process of a rank, one of which cannot load: what rank_processes starts instead of rank_main."""

from __future__ import annotations

from slipstream.engine import rank_main, rank_process
from slipstream.worker.interface import Worker

REASON = "no memory for the weights"


def start_of(number: int) -> str:
    """The code of rank_processes._START, by which the rank of this number fails once it has its plan."""
    return f"import sys; sys.path[:] = {{path!r}}; from failing_rank import main; main({number})"


def main(number: int) -> None:
    make = rank_process.ModelWorker

    def fail(config: object, spec: object, hardware: object, *others: object) -> Worker:
        if hardware.parallel.number == number:  # type: ignore[attr-defined]
            raise RuntimeError(REASON)
        return make(config, spec, hardware, *others)  # type: ignore[arg-type]

    rank_process.ModelWorker = fail  # type: ignore[assignment,misc]
    rank_main.main()
