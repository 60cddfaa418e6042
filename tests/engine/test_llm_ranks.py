"""An LLM of several ranks: it answers, it can be made again, and no call waits for ever for a rank that is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import slow_loader
import stuck_llm
from patience import PATIENCE_S, wait_until
from processes import children_of
from slipstream import LLM, SamplingParams
from slipstream.core.errors import ConfigError, RankLostError
from slipstream.engine import rank_processes
from slipstream.engine.own_thread import OwnThread

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SETTINGS = {"device": "cpu", "num_blocks": 64, "tensor_parallel_size": 2}
LOST = "rank 1 has ended: the model starts again"


def has_thread() -> bool:
    return any(thread.name == "engine" for thread in threading.enumerate())


def test_an_llm_of_two_ranks_lives_from_its_load_to_its_end_or_a_loss(tiny_llama: Path) -> None:
    """And then another one can be made here."""
    with LLM(str(tiny_llama), device="cpu", num_blocks=64) as alone:
        (expected,) = alone.generate("def add", GREEDY)
        assert not has_thread()
    with LLM(str(tiny_llama), **SETTINGS) as llm:
        assert llm.generate("def add", GREEDY)[0].token_ids == expected.token_ids
        llm.sleep()
        llm.wake_up()
        assert llm.generate("def add", GREEDY)[0].token_ids == expected.token_ids
        (rank,) = children_of(os.getpid(), "rank_main")
        rank.kill()
        for _ in range(2):
            with pytest.raises(RankLostError, match=LOST):
                llm.generate("def add", GREEDY)
    wait_until(lambda: not has_thread(), "the thread to end with its model")
    with pytest.raises(ConfigError, match="num_blocks"):
        LLM(str(tiny_llama), **{**SETTINGS, "num_blocks": 1})
    with LLM(str(tiny_llama), **SETTINGS) as llm:
        assert llm.generate("def add", GREEDY)[0].token_ids == expected.token_ids
    wait_until(lambda: not has_thread(), "the thread to end with its model")


@pytest.mark.parametrize("place", ["load", "step"])
def test_a_call_that_waits_for_a_lost_rank_for_ever_is_given_up(tiny_llama: Path, place: str) -> None:
    """So are the next ones, the process goes on, and ends by itself."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, stuck_llm.__file__, str(tiny_llama), place]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False)
    expected = [f"{place}: RankLostError: {LOST}", f"{place} ended in time"]
    if place != "load":
        expected += [f"next: RankLostError: {LOST}", "next ended in time", "close ended in time"]
    assert (ended.returncode, ended.stdout.splitlines()) == (0, expected), ended.stderr


def test_a_load_that_is_interrupted_ends_its_ranks(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the thread that waits, not the one that loads."""
    monkeypatch.setattr(rank_processes, "_START", slow_loader.start_of(1, 3600.0, notes=False))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # of a run in the background it may be

    def interrupt() -> None:
        wait_until(lambda: bool(children_of(os.getpid(), "slow_loader")), "the rank to begin")
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            LLM(str(tiny_llama), **SETTINGS)
    finally:
        signal.signal(signal.SIGINT, before)
    sender.join()
    wait_until(lambda: not has_thread(), "the load to end")
    assert not children_of(os.getpid(), "slow_loader")


def test_a_signal_that_does_not_end_a_wait_is_noticed() -> None:
    """One that comes just before the wait does not, nor one that another thread of the process is given, as here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread, may_end = OwnThread(), threading.Event()
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.run(lambda: may_end.wait(PATIENCE_S))
        may_end.set()  # the call that nobody waits for any more
        with pytest.raises(TimeoutError, match="of the call"):
            thread.run(raise_timeout)
    finally:
        may_end.set()
        signal.signal(signal.SIGINT, before)
    thread.close(list, 0.0)


def raise_timeout() -> None:
    raise TimeoutError("of the call")


def test_calls_of_a_thread_end_in_order_with_what_they_return_or_raise() -> None:
    thread, order = OwnThread(), []

    def fail() -> None:
        raise ValueError("of the call")

    def note(number: int) -> Callable[[], int]:
        return lambda: order.append(number) or number

    assert [thread.run(note(number)) for number in range(3)] == order == [0, 1, 2]
    with pytest.raises(ValueError, match="of the call"):
        thread.run(fail)
    thread.give_up(RankLostError("nobody waits"))
    assert thread.run(note(3)) == 3
    thread.close(note(4), 0.0)
    assert order == [0, 1, 2, 3, 4], "a thread that is not stuck has any time for its last call"


def given_up(thread: OwnThread, call: Callable[[], object]) -> None:
    """Who waits for the call, and who comes behind it, are told."""
    giver = threading.Timer(0.2, thread.give_up, [RankLostError("rank 1 is lost")])
    giver.start()
    for one in (call, list):
        with pytest.raises(RankLostError, match="rank 1 is lost"):
            thread.run(one)


def test_what_a_stuck_thread_holds_is_freed_when_it_goes_on() -> None:
    """At the close, or when that has waited long enough, later."""
    release, freed = threading.Event(), threading.Event()
    thread = OwnThread()
    given_up(thread, release.wait)
    threading.Timer(0.2, release.set).start()
    thread.close(freed.set, PATIENCE_S)
    assert freed.is_set()
    release, freed = threading.Event(), threading.Event()
    thread = OwnThread()
    given_up(thread, release.wait)
    thread.close(freed.set, 0.1)
    assert not freed.is_set()
    release.set()
    assert freed.wait(PATIENCE_S)
