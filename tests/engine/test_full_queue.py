"""What a request costs for which there is no room."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import GREEDY, make_engine, run_steps
from slipstream.core.errors import CapacityError, EngineError, RequestError
from slipstream.core.outputs import StepOutputs
from slipstream.core.request import Request


def test_a_request_for_which_there_is_no_room_is_not_prepared(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 sequences and the automata of its words took up to 14 ms, of the thread that reads everybody's requests."""
    engine = make_engine(tiny_llama, scheduler={"max_num_seqs": 2, "max_waiting_requests": 3})
    for _ in range(5):
        engine.submit(Request([5, 6], GREEDY))
    prepared: list[Request] = []
    monkeypatch.setattr(engine._input_processor, "prepare", prepared.append)
    for params in (GREEDY, replace(GREEDY, n=4), replace(GREEDY, n=2, beam_width=3)):
        with pytest.raises(CapacityError, match=r"max_waiting_requests=3"):
            engine.submit(Request([5, 6], params))
    with pytest.raises(RequestError, match=r"^n: got 6, accepted: at most 5"):
        engine.submit(Request([5, 6], replace(GREEDY, n=6)))
    assert not prepared
    monkeypatch.undo()
    run_steps(engine, {})
    assert engine.submit(Request([5, 6], replace(GREEDY, n=4)))


def test_requests_that_reach_the_queue_meanwhile_count_once(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were added both as arriving and as waiting: a burst that the queue could hold was refused in part."""
    engine = make_engine(tiny_llama, scheduler={"max_num_seqs": 2, "max_waiting_requests": 3})
    for _ in range(3):
        engine.submit(Request([5, 6], GREEDY))
    check, drains = engine.scheduler.check_capacity, list[threading.Thread]()

    def check_while_the_engine_drains(num_sequences: int, num_arriving: int = 0) -> None:
        if not drains:
            drains.append(threading.Thread(target=engine._drain_inbox, args=(StepOutputs(),)))
            drains[-1].start()
            drains[-1].join(0.2)
        check(num_sequences, num_arriving)

    monkeypatch.setattr(engine.scheduler, "check_capacity", check_while_the_engine_drains)
    assert engine.submit(Request([5, 6], GREEDY))
    for drain in drains:
        drain.join(30)
    assert drains and engine.scheduler.num_waiting + engine._num_arriving == 4


def test_an_engine_that_is_dead_says_so_though_its_queue_is_full(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, scheduler={"max_num_seqs": 2, "max_waiting_requests": 3})
    for _ in range(5):
        engine.submit(Request([5, 6], GREEDY))
    engine.abandon(EngineError("rank 1 is lost"))
    with pytest.raises(EngineError, match="rank 1 is lost"):
        engine.submit(Request([5, 6], GREEDY))
