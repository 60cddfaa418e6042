"""What the guard costs a stream: first text and time per token of `guarded` against the `llm` behind it.

    python tests/bench/bench_guarded.py                       # the demo model; the default encoder if it is installed
    python tests/bench/bench_guarded.py --tokens 512 --streams 8

The real server, gRPC, greedy, every answer of full length; medians; the ways take turns. Without the default encoder,
safety is a classifier of its shape with random weights that flags nothing: what it costs does not depend on the
weights. `at once` holds no text back and checks every 40 characters: what the checks alone cost.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "backend"), str(ROOT / "tests/support")]

from llm_client import grpc_stream  # noqa: E402
from llm_server import LlmServer, missing_server, parameter  # noqa: E402
from processes import asked, children_of  # noqa: E402
from tiny_encoders import has_default_encoder, write_random_minilm  # noqa: E402

DEMO_MODEL = ROOT / "models/slipstream-demo-code"
PROMPT = "def fibonacci(n):\n"
WAYS = {"llm": "llm", "guarded": "guarded", "guarded, at once": "guarded_at_once"}


def use_random_encoders(server: LlmServer, folder: Path) -> None:
    """safety: a classifier whose threshold no probability reaches."""
    for name, labels in (("safety", ("safe", "unsafe")), ("quality", ())):
        config = server.repository / name / "config.pbtxt"
        text = re.sub(r'parameters \{ key: "model".*\n', "", config.read_text())
        text += parameter("model", write_random_minilm(folder / name, labels))
        config.write_text(text + (parameter("unsafe_labels", "unsafe") + parameter("threshold", 1) if labels else ""))


def add_guarded_at_once(server: LlmServer) -> None:
    own, other = server.repository / "guarded", server.repository / "guarded_at_once"
    (other / "1").mkdir(parents=True)
    (other / "1/model.py").write_text((own / "1/model.py").read_text())
    text = (own / "config.pbtxt").read_text().replace('name: "guarded"', 'name: "guarded_at_once"')
    (other / "config.pbtxt").write_text(text + parameter("hold_back_chars", 0))


def one(server: LlmServer, model: str, num_tokens: int) -> tuple[float, float, int]:
    """(ms to the first text, ms per token after it, responses with text) of one stream."""
    inputs = {"text_input": PROMPT, "stream": True, "max_tokens": num_tokens, "temperature": 0.0}
    with grpc_stream(server.grpc_url) as stream:
        started = time.perf_counter()
        stream.send(model, inputs, parameters={"ignore_eos": True}, outputs=("text_output",))
        answer = stream.collect()
    assert not answer.error, answer.error
    arrivals = [when for when, got in zip(answer.arrivals, answer.responses) if got["text_output"].reshape(-1)[0]]
    first, last = arrivals[0] - started, answer.arrivals[-1] - started
    return first * 1e3, last * 1e3 / num_tokens, len(arrivals)


@dataclass
class Figures:
    """One way through the pipeline. rows: (first text ms, ms a token, responses) by answer; the others: by round."""

    rows: list[tuple[float, float, int]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)

    def line(self, name: str, streams: int) -> str:
        first, token, responses = (statistics.median(column) for column in zip(*self.rows))
        rate, cpu = statistics.median(self.rates), statistics.median(self.cpu_us)
        return f"| {name} | {streams} | {first:.1f} | {token:.3f} | {rate:.0f} | {cpu:.0f} | {responses:.0f} |"


def cpu_seconds(server: LlmServer, model: str) -> float:
    """CPU time of a model's processes of the Python backend; 0 for `llm`, which has none."""
    file = str(server.repository / model / "1/model.py")
    return sum(sum(asked(one.cpu_times, (0.0, 0.0))[:2]) for one in children_of(server.pid, file))


def measure(server: LlmServer, arguments: argparse.Namespace) -> None:
    """The ways take turns, so that what else the machine does falls on all of them."""
    figures, loads, num_tokens = {name: Figures() for name in WAYS}, [], arguments.tokens * arguments.streams
    with ThreadPoolExecutor(arguments.streams) as pool:
        for number in range(1 + arguments.repeats):
            for name, model in WAYS.items():
                started, used = time.perf_counter(), cpu_seconds(server, model)
                calls = [pool.submit(one, server, model, arguments.tokens) for _ in range(arguments.streams)]
                rows = [call.result() for call in calls]
                if number:  # the first round warms up
                    figures[name].rows += rows
                    figures[name].rates.append(num_tokens / (time.perf_counter() - started))
                    figures[name].cpu_us.append((cpu_seconds(server, model) - used) / num_tokens * 1e6)
            loads.append(os.getloadavg()[0])
    columns = ("way", "streams", "first text ms", "ms a token, all in", "tokens/s", "guard CPU us a token", "responses")
    print(f"| {' | '.join(columns)} |\n|---|" + "--:|" * (len(columns) - 1))
    for name in WAYS:
        print(figures[name].line(name, arguments.streams))
    print(f"load {min(loads):.1f} to {max(loads):.1f}", flush=True)


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=DEMO_MODEL, help="of the LLM; default: the demo model")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (%(default)s)")
    parser.add_argument("--streams", type=int, default=1, help="at a time (%(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=7, help="rounds, in each of which every way runs --streams answers (%(default)s)"
    )
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(given)
    if missing_server():
        raise SystemExit(missing_server())
    with tempfile.TemporaryDirectory() as name, LlmServer(Path(name), arguments.checkpoint) as server:
        if not has_default_encoder():
            use_random_encoders(server, Path(name))
        add_guarded_at_once(server)
        for model in ("safety", "quality", "guarded", "guarded_at_once"):
            status, body = server.load(model)
            if status != 200:
                raise SystemExit(f"{model}: {body.decode()}")
        measure(server, arguments)


if __name__ == "__main__":
    main()
