"""Tokens per second through the OpenAI gateway against direct gRPC, with a null model: what the gateway costs.

    python tests/bench/bench_gateway.py [--streams 64] [--tokens 200] [--repeats 3] [--max-events-per-s 4000]

The same server, engine and number of streams both ways. Direct: load_client.cc, one response per token. Through the
gateway: sockets that read server-sent events and only count. CPU is utime + stime from /proc, divided by tokens.
Target: the gateway's tokens/s at least 90 % of direct at 64 streams. A row `1 token per event` shows the gateway
without its sharing of events (backend/slipstream/server/pace.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/bench")]

from bench_backend import MissingTool, build_client, cpu_seconds, engine_of, measure  # noqa: E402
from bench_serving import write_repository, write_request  # noqa: E402
from gateway import GatewayProcess  # noqa: E402
from llm_server import backends_dir, missing_server  # noqa: E402
from triton_server import TritonServer  # noqa: E402

COLUMNS = ("way", "tokens_per_s", "ratio", "tokens_per_event", "gateway_us", "server_us", "engine_us")


@dataclass(frozen=True)
class Load:
    num_streams: int = 64
    num_tokens: int = 200
    repeats: int = 3
    max_events_per_s: int = 4000
    num_workers: int = 1
    least_tokens: int = 80_000  # of a run

    @property
    def num_requests(self) -> int:
        """Requests that each stream sends."""
        return max(2, self.least_tokens // (self.num_streams * self.num_tokens))

    @property
    def total(self) -> int:
        return self.num_streams * self.num_requests * self.num_tokens


def request_bytes(load: Load) -> bytes:
    body = {"model": "llm", "prompt": "def f(x):", "max_tokens": load.num_tokens, "temperature": 0, "ignore_eos": True}
    text = json.dumps({**body, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(text)}"
    return head.encode() + b"\r\n\r\n" + text


async def read_streams(port: int, load: Load) -> int:
    """Run all requests; returns the number of events with text."""
    request, events = request_bytes(load), 0

    async def stream() -> None:
        nonlocal events
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(load.num_requests):
            writer.write(request)
            tail = b""
            while b"data: [DONE]" not in tail:
                data = await reader.read(1 << 16)
                assert data, "the gateway closed the connection"
                events += data.count(b"data: {")
                tail = tail[-200:] + data
            assert b'"error"' not in tail, tail
        writer.close()

    await asyncio.gather(*(stream() for _ in range(load.num_streams)))
    return events


def measure_gateway(server: TritonServer, gateway: GatewayProcess, load: Load) -> dict[str, float]:
    processes = {"server_us": server.pid, "engine_us": engine_of(server.pid), "gateway_us": gateway.process.pid}
    before = {name: cpu_seconds(pid) for name, pid in processes.items()}
    started = time.perf_counter()
    events = asyncio.run(read_streams(gateway.port, load))
    seconds = time.perf_counter() - started
    figures = {name: (cpu_seconds(pid) - before[name]) / load.total * 1e6 for name, pid in processes.items()}
    return {**figures, "tokens_per_s": load.total / seconds, "tokens_per_event": load.total / events}


def measure_loaded(server: TritonServer, gateway: GatewayProcess, load: Load) -> dict[str, float]:
    """After some requests that do not count: a gateway that was idle has to learn the model's rate again."""
    asyncio.run(read_streams(gateway.port, replace(load, least_tokens=0)))
    return measure_gateway(server, gateway, load)


def median(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def directly(server: TritonServer, client: Path, request: Path, load: Load) -> dict[str, float]:
    figures = measure(server, client, request, load.num_streams, load.num_tokens)
    return {**figures, "tokens_per_s": figures["responses_per_s"], "tokens_per_event": 1.0, "gateway_us": 0.0}


def take_turns(ways: Mapping[str, Callable[[], dict[str, float]]], repeats: int) -> list[dict[str, object]]:
    """Rows by COLUMNS. The ways take turns, so that what else the machine does falls on all of them; the first round
    warms up. ratio: the median of each round's, to the first way's.
    """
    rounds = [{name: way() for name, way in ways.items()} for _ in range(1 + repeats)][1:]
    first, rows = next(iter(ways)), []
    for name in ways:
        figures = median([one[name] for one in rounds])
        ratio = statistics.median(one[name]["tokens_per_s"] / one[first]["tokens_per_s"] for one in rounds)
        rows.append({"way": name, "ratio": ratio, **figures})
    return rows


def run(load: Load) -> list[dict[str, object]]:
    """Rows by COLUMNS. Raises MissingTool."""
    backends = backends_dir()
    if backends is None or missing_server():
        raise MissingTool(missing_server())
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        client = build_client()
        request = write_request(scratch / "request.bin", load.num_tokens)
        workers = ["--workers", str(load.num_workers), "--max-events-per-s"]
        with (
            TritonServer(write_repository(scratch / "repository"), backends, env=dict(os.environ)) as server,
            GatewayProcess(server.grpc_url, [*workers, "0"]) as plain,
            GatewayProcess(server.grpc_url, [*workers, str(load.max_events_per_s)]) as sharing,
        ):
            ways = {
                "direct gRPC": lambda: directly(server, client, request, load),
                "gateway, 1 token per event": lambda: measure_gateway(server, plain, load),
                "gateway": lambda: measure_loaded(server, sharing, load),
            }
            return take_turns(ways, load.repeats)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-events-per-s", type=int, default=4000)
    arguments = parser.parse_args()
    try:
        rows = run(Load(arguments.streams, arguments.tokens, arguments.repeats, arguments.max_events_per_s))
    except MissingTool as error:
        print(f"skipped: {error}")
        return 0
    print("| " + " | ".join(COLUMNS) + " |\n|---|" + "--:|" * (len(COLUMNS) - 1))
    for row in rows:
        cells = [row[name] for name in COLUMNS]
        print("| " + " | ".join(cell if isinstance(cell, str) else f"{cell:.4g}" for cell in cells) + " |")
    print(f"load {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
