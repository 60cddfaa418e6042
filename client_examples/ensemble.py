"""Stream through `ensemble` (preprocessing -> llm -> postprocessing) with the tensors of TensorRT-LLM's clients.

    .venv/bin/python client_examples/ensemble.py --prompt "def fibonacci(n):" --max-tokens 64

Every tensor has a leading batch dimension of 1 here, as those clients send it; `llm` alone takes shapes without it.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"


def tensor(name: str, values: Any) -> triton.InferInput:
    array = np.array([[values]])
    if array.dtype.kind in "SU":
        array = np.array([[values.encode()]], dtype=np.object_)
    kind = {"O": "BYTES", "b": "BOOL", "i": "INT32", "f": "FP32"}[array.dtype.kind]
    array = array.astype({"INT32": np.int32, "FP32": np.float32}.get(kind, array.dtype))
    made = triton.InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array)
    return made


def stream(url: str, model: str, prompt: str, max_tokens: int, temperature: float = 0.0) -> Iterator[tuple[str, int]]:
    """Yield (new text, number of new tokens) per response until the final one."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    inputs = [
        tensor("text_input", prompt),
        tensor("max_tokens", max_tokens),
        tensor("temperature", temperature),
        tensor("stream", True),
        tensor("return_num_output_tokens", True),
    ]
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        with contextlib.suppress(InferenceServerException):  # of a stream that broke already; its own error says why
            client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        is_final = False
        while not is_final:
            result, error = answers.get()
            if error is not None:
                raise SystemExit(f"the server says: {error}")
            is_final = result.get_response().parameters["triton_final_response"].bool_param
            text = result.as_numpy("text_output")
            if text is not None and text.size:
                yield text.reshape(-1)[0].decode(), int(result.as_numpy("num_output_tokens").reshape(-1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address")
    parser.add_argument("--model", default="ensemble")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    arguments = parser.parse_args()
    pieces = stream(arguments.url, arguments.model, arguments.prompt, arguments.max_tokens, arguments.temperature)
    for text, _ in pieces:
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
