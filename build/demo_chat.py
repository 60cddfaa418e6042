"""The second half of `make demo`: a conversation with a real chat model through the OpenAI gateway, and a JSON answer.

Exits with 1 if an answer is empty, a later turn ignores an earlier one, or the structured answer violates its schema.
Without network it only reports that the model cannot be fetched.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chat_model import PACKAGE, chat_model
from drafters import CHAT_DRAFTERS, drafter_parameters
from free_ports import free_ports
from slipstream.core.errors import SlipstreamError

START_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 180.0
TURNS = ("What is the capital of France?", "And of Japan?")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"type": "string", "maxLength": 20}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
QUESTION = "Where is the Eiffel Tower? Give its city and country as JSON."
Message = dict[str, str]


@contextmanager
def gateway(model: Path, log: Path, parameters: dict[str, str]) -> Iterator[str]:
    """`slipstream serve` with the gateway; gives its base URL once it answers, and stops it.

    parameters: of config.pbtxt.
    """
    http, grpc, metrics, openai = free_ports(4)
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    command = [sys.executable, "-m", "slipstream.cli", "serve", "--model", str(model), *ports]
    command += ["--openai-port", str(openai), "--set", "max_model_len=2048"]
    command += [word for key, value in parameters.items() for word in ("--set", f"{key}={value}")]
    url = f"http://127.0.0.1:{openai}/v1"
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(f"{url}/models"):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not become ready:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.2)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def ask(url: str, messages: list[Message], **more: Any) -> Iterator[str]:
    """The pieces of a streamed chat completion."""
    body = {"model": "llm", "messages": messages, "temperature": 0.0, "max_tokens": 48, "stream": True, **more}
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as reply:
        for line in reply:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                event = json.loads(line[6:])
                if "error" in event:
                    raise SystemExit(f"the gateway says: {event['error']}")
                yield event["choices"][0]["delta"].get("content") or ""


def say(url: str, messages: list[Message], **more: Any) -> str:
    """Print one turn as it arrives; return the answer."""
    print(f"\n\033[1m{messages[-1]['content']}\033[0m", flush=True)
    started, first, text = time.perf_counter(), 0.0, ""
    for piece in ask(url, messages, **more):
        first = first or time.perf_counter()
        text += piece
        print(piece, end="", flush=True)
    print(f"\n-- first text after {(first - started) * 1e3:.0f} ms, {time.perf_counter() - started:.1f} s in all")
    return text


def converse(url: str) -> list[str]:
    messages: list[Message] = []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": say(url, messages)})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def problems(answers: list[str], structured: str) -> list[str]:
    """What is wrong with the answers, in words."""
    found = [f"no answer to {turn!r}" for turn, answer in zip(TURNS, answers) if not answer.strip()]
    if "Paris" not in answers[0]:
        found.append("the first answer does not name Paris")
    if "Tokyo" not in answers[1]:
        found.append("the second answer does not know what the first turn was about")
    try:
        value = json.loads(structured)
    except ValueError as error:
        return [*found, f"the structured answer is not JSON: {error}"]
    if not isinstance(value, dict) or set(value) != set(SCHEMA["properties"]):
        found.append(f"the structured answer has not the schema's properties: {value}")
    return found


def main(log: Path, method: str = "") -> int:
    """method: of speculation, with the drafter of models/."""
    try:
        parameters = drafter_parameters(method, CHAT_DRAFTERS) if method else {}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        model = chat_model()
    except (OSError, SlipstreamError) as error:
        print(f"\nno conversation is shown: {error}\n(the model comes in the package {PACKAGE}; the rest is complete)")
        return 0
    print(f"\nstarting tritonserver and the OpenAI gateway with {model.name} ...", flush=True)
    with gateway(model, log, parameters) as url:
        answers = converse(url)
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
        structured = say(url, [{"role": "user", "content": QUESTION}], response_format=form)
    wrong = problems(answers, structured)
    print("\n".join(wrong) if wrong else "\na conversation and a structured answer; the server is stopped")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("/dev/null"), *sys.argv[2:3]))
