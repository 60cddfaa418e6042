"""How many tokens an engine still computes for a client that has gone, and how soon its blocks are free.

    python tests/bench/bench_cancel.py

Starts the real server with the demo model; each way to cancel, ten times: read 10 tokens, cancel, and compare the
tokens that the engine generated with those that the client saw. The time is from the client's call to the moment when
`/metrics` shows the cancellation with no block in use, polled; metrics lag by up to 0.15 s.
"""

from __future__ import annotations

import http.client
import json
import queue
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np
import tritonclient.grpc as grpc
from llm_server import ROOT, LlmServer

READ_TOKENS = 10
RUNS = 10
Canceller = Callable[[LlmServer, str], tuple[int, float]]


def _inputs(request_id: str) -> dict:
    text = grpc.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"import os\n"], dtype=object))
    stream = grpc.InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    return {"inputs": [text, stream], "request_id": request_id, "parameters": {"max_tokens": 1500, "ignore_eos": True}}


def _grpc(server: LlmServer, model: str, stop_by_id: bool) -> tuple[int, float]:
    """Tokens seen and the time of the cancel, over gRPC: dropping the stream, or a `stop` request with the same id."""
    answers: queue.Queue = queue.Queue()
    client = grpc.InferenceServerClient(server.grpc_url)
    client.start_stream(lambda result, error: answers.put(error or result))
    request_id = uuid.uuid4().hex
    client.async_stream_infer(model, **_inputs(request_id))
    for _ in range(READ_TOKENS):
        assert not isinstance(answers.get(timeout=20), Exception)
    began = time.perf_counter()
    if stop_by_id:
        stop = grpc.InferInput("stop", [1], "BOOL")
        stop.set_data_from_numpy(np.array([True]))
        client.async_stream_infer("llm", [stop], request_id=request_id)
    else:
        client.stop_stream(cancel_requests=True)
    return READ_TOKENS + answers.qsize(), began


def _http(server: LlmServer, model: str) -> tuple[int, float]:
    """Tokens seen and the time of the cancel, closing the connection of generate_stream."""
    connection = http.client.HTTPConnection(server.http_url)
    body = {"text_input": "import os\n", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(body))
    response = connection.getresponse()
    seen = 0
    while seen < READ_TOKENS:
        seen += response.readline().startswith(b"data:")
    began = time.perf_counter()
    response.close()
    connection.close()
    return seen, began


# gRPC through the ensemble is left out: its tensors have other shapes, and HTTP goes the same way through the server
WAYS: tuple[tuple[str, str, Canceller], ...] = (
    ("gRPC cancel", "llm", lambda server, model: _grpc(server, model, stop_by_id=False)),
    ("stop by id", "llm", lambda server, model: _grpc(server, model, stop_by_id=True)),
    ("HTTP close", "llm", _http),
    ("HTTP close", "ensemble", _http),
)


def measure(server: LlmServer, way: Canceller, model: str) -> tuple[float, float]:
    """(tokens generated beyond those seen when the client cancelled, seconds until all blocks are free)."""
    server.wait_idle()
    generated = server.metric("slipstream_generation_tokens_total")
    cancelled = server.metric("slipstream_cancellations_total")
    seen, began = way(server, model)
    while server.metric("slipstream_cancellations_total") == cancelled or server.metric("slipstream_kv_blocks_used"):
        assert time.perf_counter() - began < 20, "the cancellation was not counted"
        time.sleep(0.005)
    seconds = time.perf_counter() - began
    server.wait_idle()
    return server.metric("slipstream_generation_tokens_total") - generated - seen, seconds


def main() -> None:
    checkpoint = ROOT / "models/slipstream-demo-code"
    with tempfile.TemporaryDirectory() as folder, LlmServer(Path(folder), checkpoint) as server:
        print("| way | model | tokens after, median (max) | blocks free after ms, median (max) |\n|---|---|--:|--:|")
        for name, model, way in WAYS:
            tokens, seconds = zip(*(measure(server, way, model) for _ in range(RUNS)))
            times = [1000 * s for s in seconds]
            print(
                f"| {name} | {model} | {statistics.median(tokens):.0f} ({max(tokens):.0f}) "
                f"| {statistics.median(times):.0f} ({max(times):.0f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
