"""What a request costs for which there is no room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import GREEDY, make_engine, run_steps
from slipstream.core.errors import CapacityError, RequestError
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
