"""Does `guarded` answer every request? Many at once, some of them cancelled, some of them refused.

    python tests/bench/soak_guarded.py --requests 5000 --clients 16
    python tests/bench/soak_guarded.py --requests 500 --encoders real     # safety and quality with their encoder

The real server and the demo model. Every answer is compared with that of `llm` alone; a request that ends otherwise, or
not within --limit-s, is lost. Afterwards no request may be left in the LLM, and `guarded` must still unload. Without
--encoders real, safety and quality answer at once and flag nothing: the pipeline's own ways are what is tried.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "backend"), str(ROOT / "tests/support")]

from hanging_encoder import write_hanging_encoder  # noqa: E402
from llm_client import Answer, GrpcStream, grpc_infer, grpc_stream  # noqa: E402
from llm_server import LlmServer, missing_server, parameter  # noqa: E402

DEMO_MODEL = ROOT / "models/slipstream-demo-code"
PROMPTS = tuple(
    f"def {name}(n):\n" for name in ("fibonacci", "add", "scale", "parse", "merge", "total", "walk", "read")
)


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Soak:
    def __init__(self, server: LlmServer, arguments: argparse.Namespace) -> None:
        self._server, self._arguments = server, arguments
        self._inputs = {"stream": True, "max_tokens": arguments.tokens, "temperature": 0.0}
        self._expected = {prompt: self._ask("llm", prompt) for prompt in PROMPTS}
        self.tally = Tally()

    def _ask(self, model: str, prompt: str) -> str:
        asked = {"text_input": prompt, "exclude_input_in_output": True, **self._inputs}
        answer = grpc_infer(self._server.grpc_url, model, asked, parameters={"ignore_eos": True})
        assert not answer.error, answer.error
        return answer.text

    def one(self, number: int) -> None:
        draw = random.Random(number)
        kind, share = "whole", draw.random()
        if share < self._arguments.cancelled:
            kind = "cancelled"
        elif share < self._arguments.cancelled + self._arguments.refused:
            kind = "refused"
        started = time.monotonic()
        try:
            lost = getattr(self, f"_{kind}")(draw)
        except queue.Empty:
            lost = f"no answer in {self._arguments.limit_s} s"
        self.tally.counts[kind] += 1
        self.tally.seconds.append(time.monotonic() - started)
        if lost:
            self.tally.lost.append(lost)
            print(f"request {number} ({kind}): {lost}", flush=True)

    def _whole(self, draw: random.Random) -> str:
        """ "" when all is well."""
        prompt = draw.choice(PROMPTS)
        answer = self._collect({"text_input": prompt, **self._inputs}, {"ignore_eos": True})
        if answer.error:
            return answer.error
        counted = sum(int(one["num_output_tokens"][0]) for one in answer.responses)
        is_same = answer.text == self._expected[prompt] and counted == self._arguments.tokens
        return "" if is_same else f"another answer: {counted} tokens, {answer.text!r}"

    def _cancelled(self, draw: random.Random) -> str:
        """At once, before the first text, or in the middle."""
        with grpc_stream(self._server.grpc_url, cancel=True) as stream:
            inputs = {"text_input": draw.choice(PROMPTS), **self._inputs, "max_tokens": 1500}
            stream.send("guarded", inputs, parameters={"ignore_eos": True})
            if draw.random() < 0.5:
                stream.receive(self._arguments.limit_s)
            time.sleep(draw.random() * 0.3)
        return ""

    def _refused(self, draw: random.Random) -> str:
        """By the LLM: the guard has to pass the error on."""
        answer = self._collect({"text_input": PROMPTS[0], **self._inputs, "temperature": -1.0})
        return "" if "temperature" in answer.error else f"no error of the LLM: {answer.error!r}, {answer.text!r}"

    def _collect(self, inputs: dict[str, Any], parameters: dict[str, Any] | None = None) -> Answer:
        """Raises queue.Empty.  The stream is cancelled only then: server 2.51 minds it in the moment of its end."""
        stream, has_ended = GrpcStream(self._server.grpc_url), False
        try:
            stream.send("guarded", inputs, parameters=parameters)
            answer = stream.collect(self._arguments.limit_s)
            has_ended = True
        finally:
            stream.close(cancel=not has_ended)
        return answer

    def run(self) -> None:
        started = time.monotonic()
        with ThreadPoolExecutor(self._arguments.clients) as pool:
            for number, _ in enumerate(pool.map(self.one, range(self._arguments.requests)), 1):
                if number % 250 == 0:
                    print(f"{number} requests, {time.monotonic() - started:.0f} s", flush=True)
        self._report(time.monotonic() - started)

    def _report(self, seconds: float) -> None:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.tally.counts.items()))
        longest = f"median {statistics.median(self.tally.seconds):.2f} s, longest {max(self.tally.seconds):.2f} s"
        print(f"{self._arguments.requests} requests ({counts}) in {seconds:.0f} s: {len(self.tally.lost)} lost")
        print(f"a request: {longest}; load {os.getloadavg()[0]:.1f}", flush=True)
        self._server.wait_idle(timeout_s=30)
        self._server.unload("guarded")
        for _ in range(100):
            if not _is_resident(self._server, "guarded"):
                print("nothing is left in the LLM, and guarded is unloaded")
                return
            time.sleep(0.1)
        print("guarded is not unloaded after 10 s: the server waits for the end of a request")


def _is_resident(server: LlmServer, name: str) -> bool:
    status, body = server.post("/v2/repository/index", {})
    assert status == 200, body
    return any(model["name"] == name and model.get("state") != "UNAVAILABLE" for model in json.loads(body))


def configure(server: LlmServer, arguments: argparse.Namespace) -> None:
    config = server.repository / "guarded/config.pbtxt"
    text = re.sub(r"count: \d+", f"count: {arguments.processes}", config.read_text())
    text += parameter("llm_timeout_ms", round(arguments.limit_s * 500))
    if arguments.encoders == "instant":
        write_hanging_encoder(server.repository, "instant")
        text += parameter("safety", "instant") + parameter("quality", "instant")
    config.write_text(text)
    names = ["instant"] if arguments.encoders == "instant" else ["safety", "quality"]
    for name in (*names, "guarded"):
        status, body = server.load(name)
        if status != 200:
            raise SystemExit(f"{name}: {body.decode()}")


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=16, help="requests at a time (%(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="instances of guarded (%(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer (%(default)s)")
    parser.add_argument("--cancelled", type=float, default=0.2, help="share of requests (%(default)s)")
    parser.add_argument("--refused", type=float, default=0.05, help="share of requests (%(default)s)")
    parser.add_argument("--encoders", choices=("instant", "real"), default="instant")
    parser.add_argument("--limit-s", type=float, default=60, help="of one request (%(default)s)")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(given)
    if missing_server():
        raise SystemExit(missing_server())
    with tempfile.TemporaryDirectory() as name, LlmServer(Path(name), DEMO_MODEL) as server:
        configure(server, arguments)
        soak = Soak(server, arguments)
        soak.run()
        return 1 if soak.tally.lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
