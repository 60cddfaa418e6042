"""Engines with guided requests in tests, and the processes that match their grammars."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine_driver import Told, make_engine, run_steps
from patience import PATIENCE_S
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


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def workers_of(engine: Engine) -> list[int]:
    """Process ids of what the forking process has forked: its worker and its trials."""
    return children(process_of(engine))


def state_of(pid: int) -> str:
    """The kernel's letter: R, S, T …; X when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def is_gone(pid: int) -> bool:
    return state_of(pid) in "ZX"


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, f"grammar processes go on: {pids}"
        time.sleep(0.01)
