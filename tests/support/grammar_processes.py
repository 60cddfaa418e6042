"""Engines with guided requests in tests, and the processes that match their grammars."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from engine_driver import Told, make_engine, run_steps
from processes import only_child, pids_of
from slipstream.core.config import StructuredOutputConfig
from slipstream.core.request import Request
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.engine.engine import Engine

PROMPT = [70, 201, 33]
LETTERS = Guide("regex", "[a-z]{40}")
GUIDED = SamplingParams(max_tokens=60, temperature=1.0, seed=1, guide=LETTERS)


def start(engine: Engine, params: SamplingParams = GUIDED, **named: int) -> tuple[Request, Told]:
    """Submit a request; nothing of it has run."""
    (request,) = engine.submit(Request(list(PROMPT), params, handle=7, **named))
    return request, Told()


@dataclass
class Caught:
    """told: what is told of the requests whose grammar the trial tries."""

    told: dict[Request, Told]
    trial: int


@contextmanager
def served_engine(checkpoint: Path, limits: StructuredOutputConfig) -> Iterator[Engine]:
    """An engine whose grammar processes run."""
    engine = make_engine(checkpoint, structured_output=limits)
    run_steps(engine, dict([start(engine)]))
    yield engine
    engine.close()


def process_of(engine: Engine) -> int:
    """The process id of the forking process; 0 if there is none."""
    process = engine._structured._host._link._process
    return process.pid if process is not None else 0


def workers_of(engine: Engine) -> set[int]:
    """Process ids of what the forking process has forked: its worker and its trials."""
    return pids_of(process_of(engine))


def worker_of(engine: Engine) -> int:
    """Waits until no trial runs beside the worker."""
    return only_child(process_of(engine)).pid


def signal_a_trial(engine: Engine, ask: Callable[[int], dict[Request, Told]], number: signal.Signals) -> Caught:
    """Stop or kill a trial while it runs.  ask(attempt) submits a grammar that needs one: a trial may end unseen."""
    for attempt in range(10):
        process, workers = process_of(engine), workers_of(engine)
        os.kill(process, signal.SIGSTOP)  # it forks when it goes on
        told = ask(attempt)
        run_steps(engine, told, 2)
        os.kill(process, signal.SIGCONT)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            for trial in workers_of(engine) - workers:
                with suppress(ProcessLookupError):
                    os.kill(trial, number)
                    return Caught(told, trial)
        run_steps(engine, told)
    raise AssertionError("every trial ended before it was seen")


def state_of(pid: int) -> str:
    """The kernel's letter: R, S, T …; X when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
