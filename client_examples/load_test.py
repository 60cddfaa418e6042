"""Many concurrent streams over gRPC: percentiles of TTFT and inter-token latency, tokens per second, failures.

    .venv/bin/python client_examples/load_test.py --streams 32 --requests 128 --max-tokens 64

A Python client spends 65-380 µs per message: above some thousand tokens per second it measures itself, not the server.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

PROMPTS = ("def fibonacci(n):\n", "import os\n\n", "class Stack:\n", "for index, value in enumerate(", '"""Read a file')


@dataclass
class Figures:
    """What the threads measured, in seconds.  lock guards the rest."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_requests: int = 0
    errors: list[str] = field(default_factory=list)

    def add(self, started: float, arrivals: list[float], num_tokens: int) -> None:
        with self.lock:
            self.num_requests += 1
            self.num_tokens += num_tokens
            if arrivals:
                self.ttft_s.append(arrivals[0] - started)
            self.itl_s += [later - earlier for earlier, later in itertools.pairwise(arrivals)]


def tensor(name: str, kind: str, value: Any) -> triton.InferInput:
    made = triton.InferInput(name, [1], kind)
    made.set_data_from_numpy(np.array([value], dtype=np.object_ if kind == "BYTES" else np.bool_))
    return made


def run_stream(arguments: argparse.Namespace, todo: queue.SimpleQueue[int], figures: Figures) -> None:
    """One connection: take requests from todo, one after another, until it is empty."""
    answers: queue.SimpleQueue[tuple[float, Any, Any]] = queue.SimpleQueue()
    client = triton.InferenceServerClient(arguments.url)
    client.start_stream(lambda result, error: answers.put((time.perf_counter(), result, error)))
    while True:
        try:
            index = todo.get_nowait()
        except queue.Empty:
            break
        if not run_request(client, answers, arguments, index, figures):
            break
    client.stop_stream()
    client.close()


def run_request(client: Any, answers: Any, arguments: argparse.Namespace, index: int, figures: Figures) -> bool:
    """Whether the stream takes another."""
    sampling = {"max_tokens": arguments.max_tokens, "temperature": 0.0, "ignore_eos": True}
    inputs = [
        tensor("text_input", "BYTES", PROMPTS[index % len(PROMPTS)].encode()),
        tensor("stream", "BOOL", True),
        tensor("sampling_parameters", "BYTES", json.dumps(sampling).encode()),
        tensor("return_num_output_tokens", "BOOL", True),
    ]
    outputs = [triton.InferRequestedOutput(name) for name in ("text_output", "num_output_tokens")]
    started, arrivals, num_tokens, is_final = time.perf_counter(), [], 0, False
    with contextlib.suppress(InferenceServerException):  # of a stream that broke already; its own error says why
        client.async_stream_infer(arguments.model, inputs, outputs=outputs, enable_empty_final_response=True)
    while not is_final:
        arrived, result, error = answers.get()
        if error is not None:
            with figures.lock:
                figures.errors.append(str(error))
            return not str(error).startswith("[StatusCode.")  # else it is the stream's error, not the request's
        is_final = result.get_response().parameters["triton_final_response"].bool_param
        count = result.as_numpy("num_output_tokens")
        if count is not None and len(count) and count[0]:
            arrivals.append(arrived)
            num_tokens += int(count[0])
    figures.add(started, arrivals, num_tokens)
    return True


def percentiles(name: str, seconds: list[float]) -> str:
    if not seconds:
        return f"{name:>5}: none"
    p50, p90, p99 = np.percentile(np.array(seconds) * 1e3, [50, 90, 99])
    return f"{name:>5}: p50 {p50:8.1f} ms   p90 {p90:8.1f} ms   p99 {p99:8.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--streams", type=int, default=16, help="concurrent requests")
    parser.add_argument("--requests", type=int, default=64, help="requests in all")
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()
    for name in ("streams", "requests", "max_tokens"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: {getattr(arguments, name)}, accepted: 1 or more")
    figures, todo = Figures(), queue.SimpleQueue()
    for index in range(arguments.requests):
        todo.put(index)
    threads = [threading.Thread(target=run_stream, args=(arguments, todo, figures)) for _ in range(arguments.streams)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    print(f"{figures.num_requests} requests, {figures.num_tokens} tokens in {seconds:.2f} s")
    print(f"{figures.num_tokens / seconds:.1f} tokens/s, {figures.num_requests / seconds:.2f} requests/s")
    print(percentiles("TTFT", figures.ttft_s))
    print(percentiles("ITL", figures.itl_s))
    if figures.errors:
        raise SystemExit(f"{len(figures.errors)} requests failed, the first with: {figures.errors[0]}")


if __name__ == "__main__":
    main()
