"""A streamed chat through the OpenAI gateway (`slipstream serve-openai`), with the standard library alone.

.venv/bin/python client_examples/openai_stream.py --url http://localhost:9000 --prompt "add two numbers"
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

PROMPT = "a stack of integers with push and pop"


def stream(url: str, key: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the chunks until the server says [DONE]. Closing the iterator cancels the request."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
    try:
        with urllib.request.urlopen(request) as reply:
            for line in reply:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise SystemExit(f"the server says: {chunk['error']['message']}")
                    yield chunk
    except urllib.error.HTTPError as error:
        raise SystemExit(f"the server says: {json.loads(error.read())['error']['message']}") from None
    except urllib.error.URLError as error:
        raise SystemExit(f"{url} does not answer: {error.reason}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:9000", help="the gateway")
    parser.add_argument("--key", default="", help="an API key, if the gateway asks for one")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    arguments = parser.parse_args()
    body = {"model": arguments.model, "messages": [{"role": "user", "content": arguments.prompt}]}
    body |= {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    started, first, usage = time.perf_counter(), 0.0, {"completion_tokens": 0}
    for chunk in stream(arguments.url, arguments.key, body):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text = choice["delta"].get("content")
            if text:
                first = first or time.perf_counter()
                print(text, end="", flush=True)
    seconds, ttft_ms = time.perf_counter() - started, (first - started) * 1e3
    num_tokens = usage["completion_tokens"]
    print(f"\n[{num_tokens} tokens, TTFT {ttft_ms:.0f} ms, {num_tokens / seconds:.0f} tokens/s]", file=sys.stderr)


if __name__ == "__main__":
    main()
