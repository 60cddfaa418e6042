"""Whose fault an error is that came as a text alone."""

from __future__ import annotations

import pytest
from slipstream.core.answer_faults import fault_of
from slipstream.core.errors import CapacityError, EngineError, RequestError


@pytest.mark.parametrize(
    "message",
    [
        "3 requests are running and 8 waiting; max_num_seqs=3, max_waiting_requests=8",
        "8 requests are waiting and 3 running; max_waiting_requests=8, max_num_seqs=3",
        "the engine of model 'llm' was killed (signal 9):\nout of memory; it is being restarted",
        "the model is being unloaded",
        "model 'llm' is being unloaded",
        "the model was unloaded before the request ended",
        "guarded was unloaded",
        "the server is shutting down",
        "the server is shutting down and the request did not end within drain_timeout_s",
        "the server is shutting down: Server exiting",
        "triton_url: nothing answers gRPC at 127.0.0.1:1; accepted: host:port of this server's gRPC",
        "llm was silent for longer than llm_timeout_ms=100",
        "Server exiting",
        "Request timeout expired",
        "[request id: 7] Exceeds maximum queue size",
        "in ensemble 'ensemble', [request id: <id_unknown>] Request timeout expired",
        "Request for unknown model: 'llm' has no available versions",
    ],
)
def test_what_may_succeed_later(message: str) -> None:
    assert fault_of(message) is CapacityError


@pytest.mark.parametrize("message", ["top_k: got -7, accepted: ...", "nonsense: unknown sampling parameter"])
def test_what_is_the_clients(message: str) -> None:
    assert fault_of(message) is RequestError


@pytest.mark.parametrize(
    "message",
    [
        "the engine failed",
        "RuntimeError: cannot schedule new futures while the pool is shutting down",
        "ValueError: the block was unloaded",
        "KeyError: 'Server exiting'",
        "AssertionError: max_waiting_requests=8",
        "Request for unknown model: 'llm' is not found",
    ],
)
def test_words_of_an_engines_error_make_it_no_other(message: str) -> None:
    assert fault_of(message) is EngineError
