"""wire.py against the golden bytes, against itself, and against damaged input."""

from __future__ import annotations

import backend_wire
import pytest
from golden_frames import CONFIG, FRAMES, METRICS, OUTPUTS, REQUEST, RESPONSES, SAMPLES, read_golden
from hypothesis import given
from hypothesis import strategies as st
from slipstream.protocol import wire
from slipstream.protocol.responses import response_frames


def payload_of(frame: bytes) -> bytes:
    [(_, payload)] = wire.FrameBuffer().feed(frame)
    return payload


@pytest.mark.parametrize("name", FRAMES)
def test_encoding_is_the_golden_bytes(name: str) -> None:
    assert FRAMES[name].hex() == read_golden()[name].hex()


def test_what_the_backend_sends_is_decoded() -> None:
    golden = read_golden()
    assert wire.decode_config(payload_of(golden["config"])) == CONFIG
    assert wire.decode_request(payload_of(golden["request"])) == REQUEST
    assert wire.decode_cancel(payload_of(golden["cancel"])) == 0xFFFFFFFFFFFFFFFE
    assert wire.decode_drain(payload_of(golden["drain"])) == 60_000


def test_responses_are_decoded() -> None:
    first, second, third, fourth, fifth = backend_wire.decode_responses(payload_of(FRAMES["responses"]))
    assert first == backend_wire.Response(1, 0, outputs=((0, (1,), b"\x06\0\0\0 token"),))
    assert wire.bytes_elements(second.outputs[0][2]) == ["…é".encode()]
    assert second.flags == wire.ResponseFlag.FINAL
    assert [(index, shape, len(data)) for index, shape, data in third.outputs] == [
        (0, (1,), 5),
        (1, (2, 3), 24),
        (1, (), 4),
    ]
    assert fourth == backend_wire.Response(4, 3, wire.ErrorCode.INVALID_ARG, "max_tokens: -1 is not positive")
    assert fifth == backend_wire.Response(5, 5)


def test_the_hot_path_equals_the_general_encoder() -> None:
    value = b"some text"
    general = wire.tensor_response(9, 1, [(2, (1,), wire.bytes_tensor([value]))])
    assert wire.bytes_response(9, 1, 2, value) == general


def test_frames_survive_any_fragmentation() -> None:
    stream = b"".join(FRAMES.values())
    for size in (1, 2, 3, 7, 64, len(stream)):
        buffer = wire.FrameBuffer()
        frames = [one for at in range(0, len(stream), size) for one in buffer.feed(stream[at : at + size])]
        assert [kind.name.lower() for kind, _ in frames] == list(FRAMES)
        assert [payload for _, payload in frames] == [frame[wire.FRAME_HEADER_BYTES :] for frame in FRAMES.values()]


@pytest.mark.parametrize("header", [b"\x00\x00\x00\x00\x63", b"\x01\x00\x00\x10\x03", b"\xff" * 5])
def test_an_unknown_type_or_length_is_a_protocol_error(header: bytes) -> None:
    with pytest.raises(wire.ProtocolError):
        list(wire.FrameBuffer().feed(header))


@pytest.mark.parametrize("name", ["config", "request", "cancel", "drain"])
def test_a_truncated_or_padded_payload_is_a_protocol_error(name: str) -> None:
    decode = getattr(wire, f"decode_{name}")
    payload = payload_of(FRAMES[name])
    for damaged in [payload[:end] for end in range(len(payload))] + [payload + b"\0"]:
        with pytest.raises(wire.ProtocolError):
            decode(damaged)


def test_responses_are_split_into_frames_by_size() -> None:
    responses = [wire.bytes_response(handle, 0, 0, b"x" * 300_000) for handle in range(20)]
    responses[7] = wire.bytes_response(7, 0, 0, b"x" * (3 << 20))  # more than a frame is to have
    frames = response_frames(responses)
    assert [r.handle for frame in frames for r in backend_wire.decode_responses(payload_of(frame))] == list(range(20))
    assert sorted(len(frame) for frame in frames)[-2] <= wire.FRAME_TARGET_BYTES + 100 and len(frames) == 8
    assert response_frames(responses[:2]) == [wire.encode_responses(responses[:2])]


@given(st.binary(max_size=200))
def test_random_payloads_raise_nothing_but_protocol_errors(payload: bytes) -> None:
    for decode in (wire.decode_config, wire.decode_request, backend_wire.decode_responses, wire.bytes_elements):
        try:
            decode(payload)
        except wire.ProtocolError:
            continue


def test_numbers_of_a_request_keep_their_type() -> None:
    parameters = wire.decode_request(payload_of(backend_wire.encode_request(REQUEST))).parameters
    assert [type(value) for value in parameters.values()] == [str, int, bool, float]


def test_samples_and_specs_are_what_the_golden_frames_hold() -> None:
    assert len(RESPONSES) == 5 and len(SAMPLES) == len(METRICS) == 3 and len(OUTPUTS) == 2
    assert max(len(frame) for frame in FRAMES.values()) < 400


def test_limits_are_enforced_when_encoding() -> None:
    with pytest.raises(ValueError, match="65535"):
        wire.encode_ready([wire.OutputSpec("x" * 65536, wire.DataType.BYTES)], [])
    with pytest.raises(ValueError, match="16 bytes"):
        wire.encode_hello(b"short")
