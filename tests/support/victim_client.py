"""The victim's client, a separate process, so that an attack in the test's process cannot disturb its clock.

Sends one fixed greedy request again and again, until its standard input ends. Prints a JSON object per line:
{"streaming": true} once the first stream runs, then {"text", "error", "waits_ms"} for each stream. waits_ms: to the
first token, then between tokens.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

from llm_client import grpc_stream

STREAMS_AT = 5  # tokens after which a stream counts as running


def over_grpc(options: argparse.Namespace) -> Iterator[str]:
    """Text of each response of Triton's gRPC stream.  Raises RuntimeError with the server's message."""
    sampling = {"max_tokens": options.num_tokens, "temperature": 0.0, "ignore_eos": True}
    with grpc_stream(options.grpc) as stream:
        stream.send(options.model, {"text_input": options.prompt, "stream": True}, parameters=sampling)
        while True:
            outputs, is_last, error = stream.receive()
            if error:
                raise RuntimeError(error)
            if "text_output" in outputs:
                yield b"".join(outputs["text_output"].reshape(-1)).decode()
            if is_last:
                return


def over_openai(options: argparse.Namespace) -> Iterator[str]:
    """Text of each event of the gateway's /v1/completions."""
    body = {"model": options.model, "prompt": options.prompt, "max_tokens": options.num_tokens, "temperature": 0.0}
    connection = http.client.HTTPConnection(urlsplit(options.openai).netloc, timeout=120)
    with closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True, "ignore_eos": True}), headers)
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(reply.read().decode())
        events = (line[len(b"data:") :].strip() for line in reply if line.startswith(b"data:"))
        for event in (json.loads(event) for event in events if event != b"[DONE]"):
            if "error" in event:
                raise RuntimeError(json.dumps(event["error"]))
            yield from (choice["text"] for choice in event.get("choices", ()) if choice["text"])


def say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def run_stream(options: argparse.Namespace, is_first: bool) -> None:
    """One request to its end; what came is printed."""
    texts: list[str] = []
    waits_ms: list[float] = []
    error, before = "", time.perf_counter()
    try:
        for text in over_openai(options) if options.openai else over_grpc(options):
            now = time.perf_counter()
            waits_ms.append(1e3 * (now - before))
            texts.append(text)
            before = now
            if is_first and len(texts) == STREAMS_AT:
                say({"streaming": True})
    except RuntimeError as refusal:
        error = str(refusal) or "an error without a text"
    say({"text": "".join(texts), "error": error, "waits_ms": waits_ms})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--grpc", default="")
    parser.add_argument("--openai", default="")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--num-tokens", type=int, required=True)
    options = parser.parse_args()
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    is_first = True
    while is_first or not is_over.is_set():
        run_stream(options, is_first)
        is_first = False


if __name__ == "__main__":
    main()
