"""Talk to the model in the terminal.  Ctrl-C cancels an answer, Ctrl-D or an empty line ends the talk.

A transcript is kept as plain text ("User: ... Assistant: ..."), so this works with base models too; the server needs no
chat template.  With --code every line you type is appended to a program that the model continues.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException


def text_tensor(name: str, value: str) -> triton.InferInput:
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
    return tensor


def stream(url: str, model: str, prompt: str, sampling: dict[str, Any]) -> Iterator[str]:
    """Yield text as it arrives.  Abandoning the iterator cancels the request."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    streaming = triton.InferInput("stream", [1], "BOOL")
    streaming.set_data_from_numpy(np.array([True]))
    inputs = [text_tensor("text_input", prompt), streaming, text_tensor("sampling_parameters", json.dumps(sampling))]
    outputs = [triton.InferRequestedOutput("text_output")]
    client = triton.InferenceServerClient(url)
    client.start_stream(lambda result, error: answers.put((result, error)))
    with contextlib.suppress(InferenceServerException):  # of a stream that broke already; its own error says why
        client.async_stream_infer(model, inputs, outputs=outputs, enable_empty_final_response=True)
    try:
        while True:
            result, error = answers.get()
            if error is not None:
                raise SystemExit(f"the server says: {error}")
            text = result.as_numpy("text_output")
            if text is not None and len(text):
                yield text[0].decode()
            if result.get_response().parameters["triton_final_response"].bool_param:
                return
    finally:
        client.stop_stream(cancel_requests=True)
        client.close()


def answer(arguments: argparse.Namespace, prompt: str, stop: list[str]) -> str:
    sampling = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature, "stop": stop}
    said = ""
    pieces = stream(arguments.url, arguments.model, prompt, sampling)
    try:
        for text in pieces:
            said += text
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()
        print(" [cancelled]", end="")
    print()
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--code", action="store_true", help="continue a program instead of a talk")
    arguments = parser.parse_args()
    transcript = ""
    while True:
        try:
            line = input(">>> ")
        except EOFError:
            return
        if not line:
            return
        if arguments.code:
            transcript += line + "\n"
            transcript += answer(arguments, transcript, ["\n\n\n"]).rstrip("\n") + "\n"
        else:
            transcript += f"User: {line}\nAssistant:"
            transcript += answer(arguments, transcript, ["\nUser:"]) + "\n"


if __name__ == "__main__":
    main()
