"""The harness of attacks itself: it passes beside what does no harm and fails beside what does."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from llm_client import grpc_infer
from llm_server import LlmServer
from victim import Comparison, Run, assert_unharmed

pytestmark = pytest.mark.alone

TOKENS = 40  # fewer than attacks are judged by: what is shown here shows in a second


def busiest(server: LlmServer) -> psutil.Process:
    """The engine that has run a model; those of pre- and postprocessing load none."""
    return max(server.engines(), key=lambda engine: engine.memory_info().rss)


def test_a_small_request_does_no_harm(llm_server: LlmServer) -> None:
    def ask() -> None:
        assert not grpc_infer(llm_server.grpc_url, "llm", {"text_input": "x = "}, parameters={"max_tokens": 2}).error

    comparison = assert_unharmed(llm_server, ask, num_tokens=TOKENS)
    assert len(comparison.quiet.waits_ms) == TOKENS and comparison.attacked.median_ms > 0


def test_an_engine_that_stops_for_a_second_is_seen(llm_server: LlmServer) -> None:
    @contextmanager
    def stopped() -> Iterator[None]:
        engine = busiest(llm_server)
        engine.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            engine.send_signal(signal.SIGCONT)

    with pytest.raises(AssertionError, match=r"largest gap is more than[^$]*quiet: median"):
        assert_unharmed(llm_server, stopped, num_tokens=TOKENS, attempts=1)


def test_a_dead_engine_and_an_attack_that_fails_are_seen(llm_server: LlmServer) -> None:
    def kill() -> None:
        busiest(llm_server).kill()
        time.sleep(0.5)

    with pytest.raises(AssertionError, match="the victim got an error"):
        assert_unharmed(llm_server, kill, num_tokens=TOKENS)
    llm_server.wait_until(lambda: not llm_server.is_model_ready("llm"), "llm not to be ready")
    llm_server.wait_model_ready("llm")

    def broken() -> None:
        raise ValueError("the attack's own")

    with pytest.raises(ValueError, match="the attack's own"):
        assert_unharmed(llm_server, broken, num_tokens=TOKENS)


@pytest.mark.parametrize(
    ("waits_ms", "harm"),
    [([2.0] * 99, ""), ([3.1] * 99, "median"), ([2.0] * 98 + [390.0], ""), ([2.0] * 98 + [500.0], "largest gap")],
)
def test_what_counts_as_harm(waits_ms: list[float], harm: str) -> None:
    quiet = Run(("a",), (), (2.0,) * 98 + (20.0,))
    found = Comparison(quiet, Run(("a",), (), tuple(waits_ms))).harm()
    assert (harm in found) if harm else (found == "")
