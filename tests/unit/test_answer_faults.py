"""Whose fault an error is that came as a text alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from slipstream.core.answer_faults import fault_of, with_code, without_code
from slipstream.core.errors import CapacityError, EngineError, RequestError, SlipstreamError

WAITING = "3 requests of 9000 bytes wait to be tokenised, this has 4000; max_waiting_requests=3, max_tokenizing_bytes=1"


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (f"{WAITING} [UNAVAILABLE]", CapacityError),
        (
            "the engine of model 'llm' was killed (signal 9):\nout of memory; it is being restarted [UNAVAILABLE]",
            CapacityError,
        ),
        ("the request has 2000 request parameters, accepted: at most 1024 [INVALID_ARG]", RequestError),
        ("input 'x' lies in GPU memory [UNSUPPORTED]", RequestError),
        ("in ensemble 'ensemble', top_k: got -7, accepted: ... [INVALID_ARG]", RequestError),
        ("internal error 12ab: the server's log has the reason under this number [INTERNAL]", EngineError),
        ("stop: got '[UNAVAILABLE]', accepted: ... [INVALID_ARG]", RequestError),
        ("Server exiting", CapacityError),
        ("Request timeout expired", CapacityError),
        ("[request id: 7] Exceeds maximum queue size", CapacityError),
        ("in ensemble 'ensemble', [request id: <id_unknown>] Request timeout expired", CapacityError),
        ("Request for unknown model: 'llm' has no available versions", CapacityError),
        ("Request for unknown model: 'llm' is not found", EngineError),
        ("KeyError: 'Server exiting'", EngineError),
        ("the engine failed [SOON]", EngineError),
    ],
)
def test_the_code_tells_or_a_form_of_tritons_own(message: str, fault: type[SlipstreamError]) -> None:
    assert fault_of(message) is fault


@pytest.mark.parametrize("fault", [RequestError, CapacityError, EngineError])
def test_a_code_is_added_once_and_taken_off(fault: type[SlipstreamError]) -> None:
    told = with_code(with_code(WAITING, EngineError), fault)
    assert fault_of(told) is fault and without_code(told) == WAITING == without_code(WAITING)


def test_the_backend_writes_the_codes_that_are_read(root: Path) -> None:
    written = set(re.findall(r'return "([A-Z_]+)"', (root / "backend/triton/status.h").read_text()))
    assert len(written) == 8
    assert all(without_code(f"x [{code}]") == "x" for code in written)
