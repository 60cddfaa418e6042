"""What goes wrong in one request ends that request alone, and its client reads nothing of others or of the server."""

from __future__ import annotations

from typing import Any

import backend_wire
import pytest
from engine_peer import Backend, InThread
from patience import wait_until
from slipstream.protocol import wire
from slipstream.protocol.wire import ErrorCode, FrameType, ResponseFlag

UNREADABLE = backend_wire.encode_request(wire.Request(2, 0, 0, "", (), (), {"x": 1.5}))


@pytest.mark.parametrize("damage", [b"", b"\x07", b"\xff" * 40], ids=["cut", "cut elsewhere", "no such count"])
def test_a_frame_that_cannot_be_read_answers_its_own_request_alone(
    backend: Backend, null_server: InThread, damage: bytes
) -> None:
    null_server.slow_down(0.005)
    backend.request(1, 30)
    backend.next(FrameType.RESPONSES)
    payload = UNREADABLE[wire.FRAME_HEADER_BYTES : -20] + damage
    backend.connection.sendall(wire.encode_frame(FrameType.REQUEST, payload))
    [refused] = backend.responses_of(2)
    assert refused.error_code == ErrorCode.INTERNAL and refused.error_message.startswith("internal error ")
    backend.request(3, 5)
    assert backend.responses_of(3)[-1].flags == ResponseFlag.FINAL


def test_an_unforeseen_exception_is_not_told_to_clients(
    backend: Backend, null_server: InThread, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("/srv/secret/prompt of somebody else")

    null_server.server._engine.submit = broken  # type: ignore[method-assign]
    backend.request(1, 5)
    [refused] = backend.responses_of(1)
    assert refused.error_code == ErrorCode.INTERNAL and "secret" not in refused.error_message
    number = refused.error_message.split(":")[0]
    assert f"{number}: " in caplog.text and "secret" in caplog.text


def test_a_response_that_no_frame_should_hold_fails_its_own_request_alone(
    backend: Backend, null_server: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    null_server.slow_down(0.005)
    monkeypatch.setattr(wire, "MAX_RESPONSE_BYTES", 100)
    backend.request(1, 60)
    backend.next(FrameType.RESPONSES)
    backend.request(2, 50, stream=False, n=3)
    [refused] = backend.responses_of(2)
    assert refused.error_code == ErrorCode.INVALID_ARG and "accepted: at most 100" in refused.error_message
    backend.request(3, 5)
    assert backend.responses_of(3)[-1].flags == ResponseFlag.FINAL
    wait_until(lambda: not null_server.server._live, "the first request to end")
    assert null_server.server._engine.scheduler.cache.num_used_blocks == 0


def test_a_failing_engine_answers_everybody_and_exits_with_1(
    backend: Backend, null_server: InThread, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    null_server.slow_down(0.005)
    backend.request(1, 900)
    backend.request(2, 900)
    backend.next(FrameType.RESPONSES)
    null_server.server._engine.worker.execute = broken  # type: ignore[method-assign]
    errors: dict[int, backend_wire.Response] = {}
    while set(errors) != {1, 2}:
        for response in backend_wire.decode_responses(backend.next(FrameType.RESPONSES)):
            if response.flags & ResponseFlag.FINAL:
                errors[response.handle] = response
    assert {e.error_code for e in errors.values()} == {ErrorCode.INTERNAL}
    told = {e.error_message for e in errors.values()}
    assert len(told) == 1 and "out of luck" not in str(told)
    assert told.pop().split(":")[0] in caplog.text and "out of luck" in caplog.text
    assert null_server.join() == 1


def test_a_backend_that_is_gone_with_unread_frames_ends_the_server_as_any_other(
    backend: Backend, null_server: InThread
) -> None:
    """The kernel then reports a reset connection instead of its end."""
    null_server.slow_down(0.005)
    backend.request(1, 30)
    wait_until(lambda: null_server.num_steps > 2, "answers that nobody reads")
    backend.connection.close()
    assert null_server.join() == 0
