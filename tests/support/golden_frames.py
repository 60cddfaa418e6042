"""One sample of every frame type: the source of tests/golden/frames.txt, with which both ends are compared."""

from __future__ import annotations

from pathlib import Path

import backend_wire
from slipstream.protocol import wire

GOLDEN_FILE = Path(__file__).resolve().parents[1] / "golden" / "frames.txt"
TOKEN = bytes(range(16))

CONFIG = wire.Config("llm", 3, "/models/llm", '{"name":"llm","max_batch_size":0}')
REQUEST = wire.Request(
    handle=0x0102030405060708,
    arrival_ns=1_700_000_000_123_456_789,
    timeout_us=2_500_000,
    request_id="réq-1",
    requested_outputs=("text_output", "finish_reason"),
    inputs=(
        wire.Tensor("text_input", wire.DataType.BYTES, (1, 1), wire.bytes_tensor(["héllo".encode()])),
        wire.Tensor("max_tokens", wire.DataType.INT32, (1,), (16).to_bytes(4, "little")),
        wire.Tensor("empty", wire.DataType.INT64, (1, 0), b""),
    ),
    parameters={"schema": '{"a":1}', "priority": -2, "stream": True, "temperature": 0.5},
)
OUTPUTS = (wire.OutputSpec("text_output", wire.DataType.BYTES), wire.OutputSpec("logprobs", wire.DataType.FP32))
METRICS = (
    wire.MetricSpec("slipstream_tokens_total", wire.MetricKind.COUNTER, "Tokens", (("kind", "prompt"),)),
    wire.MetricSpec("slipstream_requests", wire.MetricKind.GAUGE, "Requests", (("state", "a"), ("tier", "b"))),
    wire.MetricSpec("slipstream_ttft_seconds", wire.MetricKind.HISTOGRAM, "TTFT", (), (0.25, 0.5, 1.0)),
)
RESPONSES = (
    wire.bytes_response(1, 0, 0, b" token"),
    wire.bytes_response(2, wire.ResponseFlag.FINAL, 0, "…é".encode()),
    wire.tensor_response(3, 1, [(0, (1,), wire.bytes_tensor([b"x"])), (1, (2, 3), bytes(24)), (1, (), bytes(4))]),
    wire.error_response(4, wire.ErrorCode.INVALID_ARG, "max_tokens: -1 is not positive"),
    wire.final_response(5),
)
SAMPLES = ((0, [3.0]), (1, [7.5]), (2, [0.1, 0.3, 2.0]))

FRAMES = {
    "hello": wire.encode_hello(TOKEN),
    "config": backend_wire.encode_config(CONFIG),
    "request": backend_wire.encode_request(REQUEST),
    "cancel": backend_wire.encode_cancel(0xFFFFFFFFFFFFFFFE),
    "drain": backend_wire.encode_drain(60_000),
    "ready": wire.encode_ready(OUTPUTS, METRICS),
    "load_failed": wire.encode_load_failed("no weights"),
    "responses": wire.encode_responses(RESPONSES),
    "metrics": wire.encode_metrics(SAMPLES),
    "drained": wire.encode_drained(),
}


def read_golden() -> dict[str, bytes]:
    """Name -> the bytes that were checked in."""
    lines = GOLDEN_FILE.read_text().splitlines()
    return {name: bytes.fromhex(digits) for name, _, digits in (line.partition(" ") for line in lines)}
