"""How ranks of a model end when its load fails or one is lost: soon, with the reason, and nobody waits for ever."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from engine_driver import make_engine
from failing_rank import REASON, start_of
from processes import children_of
from slipstream.core.config import ParallelConfig
from slipstream.core.errors import EngineError
from slipstream.engine import rank_processes, ranks

FOUR = ParallelConfig(tensor_parallel_size=4)


def ranks_here() -> list[psutil.Process]:
    return children_of(os.getpid(), "rank_main")


def test_a_failure_of_the_first_rank_is_told_soon(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, in a call that waits for this one, are listened to and ended all at once."""
    monkeypatch.setattr(rank_processes, "_END_TIMEOUT_S", 30.0)
    monkeypatch.setattr(ranks, "_FIND_S", 4.0)
    failed_at = [0.0]

    def fail(*arguments: object) -> NoReturn:
        failed_at[0] = time.monotonic()
        raise RuntimeError("no memory for the first rank")

    with pytest.raises(RuntimeError, match="no memory for the first rank"):
        make_engine(tiny_llama, parallel=FOUR, make_worker=fail)
    assert time.monotonic() - failed_at[0] < 12 and not ranks_here(), "three times 30 s, and 4, one after the other"


@pytest.mark.parametrize("number", [1, 3])
def test_the_rank_that_failed_first_is_told(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """And not another one, whose calls fail because of it."""
    monkeypatch.setattr(rank_processes, "_START", start_of(number))
    with pytest.raises(EngineError, match=f"rank {number}: {REASON}"):
        make_engine(tiny_llama, parallel=FOUR)
    assert not children_of(os.getpid(), "failing_rank")
