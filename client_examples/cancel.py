"""Stop a running generation, in the two ways there are over gRPC.

.venv/bin/python client_examples/cancel.py         # cancel the stream: ends every request on it
.venv/bin/python client_examples/cancel.py --stop  # send a request with the same id and `stop`: ends that one alone,
                                                   # also one that was sent to `ensemble`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import time
import uuid
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException


def tensor(name: str, kind: str, value: Any, shape: list[int]) -> triton.InferInput:
    made = triton.InferInput(name, shape, kind)
    made.set_data_from_numpy(np.array([value], dtype=triton_dtype(kind)).reshape(shape))
    return made


def triton_dtype(kind: str) -> Any:
    return {"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32}[kind]


def start(client: triton.InferenceServerClient, arguments: argparse.Namespace, request_id: str) -> None:
    shape = [1, 1] if arguments.model == "ensemble" else [1]
    inputs = [
        tensor("text_input", "BYTES", arguments.prompt.encode(), shape),
        tensor("max_tokens", "INT32", arguments.max_tokens, shape),
        tensor("stream", "BOOL", True, shape),
        tensor("end_id", "INT32", -1, shape),  # no token ends the text: it would go on to max_tokens
    ]
    outputs = [triton.InferRequestedOutput("text_output")]
    with contextlib.suppress(InferenceServerException):  # of a stream that broke already; its own error says why
        client.async_stream_infer(arguments.model, inputs, outputs=outputs, request_id=request_id)


def send_stop(url: str, request_id: str) -> None:
    """Ask `llm` to end the request of that id, wherever it came in.  Its own answer is an empty final response."""
    done: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: done.put(error))
        inputs = [tensor("text_input", "BYTES", b"", [1]), tensor("stop", "BOOL", True, [1])]
        client.async_stream_infer("llm", inputs, request_id=request_id, enable_empty_final_response=True)
        error = done.get(timeout=10)
    if error is not None:
        raise SystemExit(f"the server says: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address")
    parser.add_argument("--model", default="llm", help="llm or ensemble")
    parser.add_argument("--prompt", default="import os\n")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--after", type=int, default=8, help="responses to wait for before cancelling")
    parser.add_argument("--stop", action="store_true", help="stop by request id instead of cancelling the stream")
    arguments = parser.parse_args()
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client = triton.InferenceServerClient(arguments.url)
    client.start_stream(lambda result, error: answers.put((result, error)))
    request_id = str(uuid.uuid4())
    start(client, arguments, request_id)
    for _ in range(arguments.after):
        result, error = answers.get(timeout=30)
        if error is not None:
            raise SystemExit(f"the server says: {error}")
        text = result.as_numpy("text_output")
        print(text.reshape(-1)[0].decode() if text is not None else "", end="", flush=True)
    started = time.perf_counter()
    if arguments.stop:
        send_stop(arguments.url, request_id)
        client.stop_stream()
    else:
        client.stop_stream(cancel_requests=True)
    rest = answers.qsize()
    print(f"\n[stopped in {(time.perf_counter() - started) * 1e3:.0f} ms; {rest} responses were still on their way]")
    print(json.dumps({"responses_before": arguments.after, "responses_after": rest}))


if __name__ == "__main__":
    main()
