"""Stream a completion over HTTP (server-sent events of `generate_stream`), with the standard library alone.

.venv/bin/python client_examples/http_stream.py --prompt "def fibonacci(n):" --max-tokens 64
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"


def stream(url: str, model: str, prompt: str, sampling: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one object per event.  Closing the connection, as leaving this loop does, cancels the request."""
    body = json.dumps({"text_input": prompt, "stream": True, **sampling}).encode()
    request = urllib.request.Request(f"http://{url}/v2/models/{model}/generate_stream", data=body)
    try:
        with urllib.request.urlopen(request) as events:
            for line in events:
                if line.startswith(b"data:"):
                    yield json.loads(line[len(b"data:") :])
    except urllib.error.HTTPError as error:
        raise SystemExit(f"the server says: {error.read().decode()}") from None
    except urllib.error.URLError as error:
        raise SystemExit(f"{url} does not answer: {error.reason}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8000", help="HTTP address")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    arguments = parser.parse_args()
    sampling = {
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "return_num_output_tokens": True,
    }
    started, first, num_tokens = time.perf_counter(), 0.0, 0
    for event in stream(arguments.url, arguments.model, arguments.prompt, sampling):
        if "error" in event:  # an error after the first token: the status line was sent long ago
            raise SystemExit(f"the server says: {event['error']}")
        first = first or time.perf_counter()
        num_tokens += event.get("num_output_tokens", 1)
        print(event["text_output"], end="", flush=True)
    seconds = time.perf_counter() - started
    ttft_ms = (first - started) * 1e3
    print()
    print(f"[{num_tokens} tokens, TTFT {ttft_ms:.0f} ms, {num_tokens / seconds:.0f} tokens/s]", file=sys.stderr)


if __name__ == "__main__":
    main()
