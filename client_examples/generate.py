"""Complete a prompt and print the whole text at once, over gRPC (or HTTP with --protocol http).

.venv/bin/python client_examples/generate.py --prompt "def fibonacci(n):" --max-tokens 48
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import sys
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"


def text_tensor(name: str, value: str) -> triton.InferInput:
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
    return tensor


def generate_grpc(url: str, model: str, prompt: str, sampling: dict[str, Any]) -> tuple[str, int]:
    """The text and its number of tokens. One request on a gRPC stream: a model that can stream answers there, also when
    it sends one response only."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client = triton.InferenceServerClient(url)
    client.start_stream(lambda result, error: answers.put((result, error)))
    inputs = [text_tensor("text_input", prompt), text_tensor("sampling_parameters", json.dumps(sampling))]
    outputs = [triton.InferRequestedOutput(name) for name in ("text_output", "num_output_tokens")]
    with contextlib.suppress(InferenceServerException):  # of a stream that broke already; its own error says why
        client.async_stream_infer(model, inputs, outputs=outputs)
    result, error = answers.get()
    client.stop_stream()
    if error is not None:
        raise SystemExit(f"the server says: {error}")
    return result.as_numpy("text_output")[0].decode(), int(result.as_numpy("num_output_tokens")[0])


def generate_http(url: str, model: str, prompt: str, sampling: dict[str, Any]) -> tuple[str, int]:
    """POST /v2/models/<model>/generate: scalars next to text_input are sampling parameters."""
    body = json.dumps({"text_input": prompt, "return_num_output_tokens": True, **sampling}).encode()
    try:
        with urllib.request.urlopen(f"http://{url}/v2/models/{model}/generate", data=body) as reply:
            answer = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        raise SystemExit(f"the server says: {error.read().decode()}") from None
    except urllib.error.URLError as error:
        raise SystemExit(f"{url} does not answer: {error.reason}") from None
    return answer["text_output"], answer["num_output_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="default: localhost:8001 (gRPC) or localhost:8000 (HTTP)")
    parser.add_argument("--protocol", choices=["grpc", "http"], default="grpc")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    arguments = parser.parse_args()
    sampling = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    generate = generate_grpc if arguments.protocol == "grpc" else generate_http
    url = arguments.url or {"grpc": "localhost:8001", "http": "localhost:8000"}[arguments.protocol]
    text, num_tokens = generate(url, arguments.model, arguments.prompt, sampling)
    print(text)
    print(f"[{num_tokens} tokens]", file=sys.stderr)


if __name__ == "__main__":
    main()
