"""`make demo`: a real tritonserver completes a real prompt over gRPC, HTTP and the ensemble, and is stopped again.

Prints text as it arrives, with TTFT and tokens per second.  Exits with 1 if a protocol fails or two texts differ.
Uses the clients of client_examples/.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from serve import REPOSITORY, ROOT, Address, free_address, running_server

sys.path.insert(0, str(ROOT / "client_examples"))
import ensemble as ensemble_client
import generate as generate_client
import http_stream as http_client
import stream as grpc_client

PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
SAMPLING = {"max_tokens": 48, "temperature": 0.0}
START_TIMEOUT_S = 120.0

Pieces = Iterator[tuple[str, int]]


def over_grpc(address: Address) -> Pieces:
    yield from grpc_client.stream(address.grpc_url, "llm", PROMPT, SAMPLING)


def over_http_stream(address: Address) -> Pieces:
    for event in http_client.stream(address.http_url, "llm", PROMPT, {**SAMPLING, "return_num_output_tokens": True}):
        if "error" in event:
            raise SystemExit(f"the server says: {event['error']}")
        yield event["text_output"], event["num_output_tokens"]


def over_http(address: Address) -> Pieces:
    sampling = {**SAMPLING, "exclude_input_in_output": True}
    yield generate_client.generate_http(address.http_url, "llm", PROMPT, sampling)


def over_ensemble(address: Address) -> Pieces:
    yield from ensemble_client.stream(address.grpc_url, "ensemble", PROMPT, SAMPLING["max_tokens"])


WAYS: tuple[tuple[str, Callable[[Address], Pieces]], ...] = (
    ("gRPC stream, llm", over_grpc),
    ("HTTP generate_stream, llm", over_http_stream),
    ("HTTP generate, llm", over_http),
    ("gRPC stream, ensemble (TensorRT-LLM tensors)", over_ensemble),
)


def show(title: str, pieces: Pieces) -> str:
    """Print the text of one protocol as it arrives; return it."""
    print(f"\n\033[1m{title}\033[0m\n{PROMPT}", end="", flush=True)
    started, first, num_tokens, num_pieces, text = time.perf_counter(), 0.0, 0, 0, ""
    for piece, count in pieces:
        first = first or time.perf_counter()
        text += piece
        num_tokens += count
        num_pieces += 1
        print(piece, end="", flush=True)
    seconds, ttft_ms = time.perf_counter() - started, (first - started) * 1e3
    when = f"TTFT {ttft_ms:.0f} ms" if num_pieces > 1 else f"in one piece after {ttft_ms:.0f} ms"
    print(f"\n-- {num_tokens} tokens, {when}, {num_tokens / seconds:.0f} tokens/s", flush=True)
    return text


def main() -> int:
    address = free_address()
    with tempfile.TemporaryDirectory(prefix="slipstream-demo-") as folder:
        started = time.perf_counter()
        print(f"starting tritonserver --model-repository={REPOSITORY.name} on {address.http_url} ...", flush=True)
        with running_server(REPOSITORY, address, Path(folder) / "server.log", START_TIMEOUT_S):
            print(f"ready after {time.perf_counter() - started:.1f} s")
            texts = {title: show(title, way(address)) for title, way in WAYS}
    if not all(texts.values()) or len(set(texts.values())) > 1:
        print(f"\nthe ways disagree: {texts}", file=sys.stderr)
        return 1
    print("\nall ways gave the same text; the server is stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
