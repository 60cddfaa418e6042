"""Stream a completion over gRPC: text is printed as it arrives, then the time to first token and tokens per second.

.venv/bin/python client_examples/stream.py --prompt "def fibonacci(n):" --max-tokens 64
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"


def tensor(name: str, kind: str, value: Any) -> triton.InferInput:
    made = triton.InferInput(name, [1], kind)
    made.set_data_from_numpy(np.array([value], dtype=np.object_ if kind == "BYTES" else np.bool_))
    return made


def stream(url: str, model: str, prompt: str, sampling: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield (new text, number of new tokens) until the server marks the response as final."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    inputs = [
        tensor("text_input", "BYTES", prompt.encode()),
        tensor("stream", "BOOL", True),
        tensor("sampling_parameters", "BYTES", json.dumps(sampling).encode()),
        tensor("return_num_output_tokens", "BOOL", True),
    ]
    outputs = [triton.InferRequestedOutput(name) for name in ("text_output", "num_output_tokens")]
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        # without the empty final response a stream whose last text came earlier would not be seen to end
        with contextlib.suppress(InferenceServerException):  # of a stream that broke already; its own error says why
            client.async_stream_infer(model, inputs, outputs=outputs, enable_empty_final_response=True)
        is_final = False
        while not is_final:
            result, error = answers.get()
            if error is not None:
                raise SystemExit(f"the server says: {error}")
            is_final = result.get_response().parameters["triton_final_response"].bool_param
            text = result.as_numpy("text_output")
            if text is not None and len(text):
                count = result.as_numpy("num_output_tokens")
                yield text[0].decode(), int(count[0]) if count is not None else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    arguments = parser.parse_args()
    sampling = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    started, first, num_tokens = time.perf_counter(), 0.0, 0
    for text, count in stream(arguments.url, arguments.model, arguments.prompt, sampling):
        first = first or time.perf_counter()
        num_tokens += count
        print(text, end="", flush=True)
    seconds = time.perf_counter() - started
    ttft_ms = (first - started) * 1e3
    print()
    print(f"[{num_tokens} tokens, TTFT {ttft_ms:.0f} ms, {num_tokens / seconds:.0f} tokens/s]", file=sys.stderr)


if __name__ == "__main__":
    main()
