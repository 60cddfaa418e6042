"""CPU and rate of streamed responses through the real server and the C++ backend, with a null model.

    python tests/bench/bench_backend.py [--streams 1 16 64 256] [--tokens 100] [--repeats 3]

The engine is the scripted stand-in (one token for every request per step, no waiting), the client is load_client.cc.
Server CPU is utime + stime of the tritonserver process from /proc, engine and client apart.  Targets: at most 40 us of
server CPU per response, at least 20 000 responses/s at 64 streams.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from fake_backend import add_model, compile_library, make_backend_dir  # noqa: E402
from processes import only_child  # noqa: E402
from triton_server import TritonServer, find_tritonserver  # noqa: E402

CLIENT_SOURCE = Path(__file__).with_name("load_client.cc")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


COLUMNS = ("streams", "responses_per_s", "server_us", "engine_us", "first_ms_p50", "next_ms_p50", "next_ms_p99")


class MissingTool(Exception):
    """Something this benchmark needs is not installed here."""


@dataclass(frozen=True)
class Load:
    """num_tokens responses to each request; the median of `repeats` runs counts."""

    stream_counts: Sequence[int]
    num_tokens: int
    repeats: int


def build_client() -> Path:
    """load_client.cc compiled, once: kept in the user's cache folder.  Returns its path.  Raises MissingTool."""
    if shutil.which("g++") is None or shutil.which("pkg-config") is None:
        raise MissingTool("g++ and pkg-config are needed to build the load client")
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "grpc++"], capture_output=True, text=True, check=False)
    if flags.returncode != 0:
        raise MissingTool("gRPC for C++ is not installed (Debian: apt install libgrpc++-dev)")
    command = ["g++", "-O2", "-std=c++17", str(CLIENT_SOURCE), *flags.stdout.split()]
    made_of = hashlib.sha256("\0".join(command).encode() + CLIENT_SOURCE.read_bytes()).hexdigest()[:20]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream" / "bench"
    client = folder / f"load_client-{made_of}"
    if not client.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # moved into place whole
            subprocess.run([*command, "-o", f"{scratch}/client"], check=True)
            os.replace(f"{scratch}/client", client)
    return client


def write_request(path: Path, model: str, num_tokens: int) -> Path:
    """A serialised ModelInferRequest that asks the stand-in engine for num_tokens tokens."""
    from tritonclient.grpc import service_pb2

    text = json.dumps({"tokens": num_tokens}).encode()
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.outputs.add(name="text_output")
    request.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    path.write_bytes(request.SerializeToString())
    return path


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def engine_of(pid: int) -> int:
    """The engine process of a server with one model."""
    return only_child(pid).pid


def measure(server: TritonServer, client: Path, request: Path, num_streams: int, num_tokens: int) -> dict[str, float]:
    """One run of the client: its figures, and CPU microseconds per response of server and engine."""
    num_requests = max(2, 40000 // (num_streams * num_tokens))
    engine = engine_of(server.pid)
    before = cpu_seconds(server.pid), cpu_seconds(engine)
    arguments = [server.grpc_url, str(request), str(num_streams), str(num_requests), str(num_tokens), "60"]
    output = subprocess.run([str(client), *arguments], capture_output=True, text=True, check=True).stdout
    figures = json.loads(output)
    assert figures["errors"] == 0 and figures["messages"] == num_streams * num_requests * num_tokens, figures
    figures["server_us"] = (cpu_seconds(server.pid) - before[0]) / figures["messages"] * 1e6
    figures["engine_us"] = (cpu_seconds(engine) - before[1]) / figures["messages"] * 1e6
    return figures


def sweep(repository: Path, backends: Path, client: Path, request: Path, load: Load) -> list[dict[str, float]]:
    """Medians over load.repeats runs for each number of streams, against a server of its own."""
    rows = []
    with TritonServer(repository, backends) as server:
        measure(server, client, request, 16, load.num_tokens)  # warm up
        for num_streams in load.stream_counts:
            runs = [measure(server, client, request, num_streams, load.num_tokens) for _ in range(load.repeats)]
            rows.append(
                {"streams": num_streams, **{name: statistics.median(r[name] for r in runs) for name in runs[0]}}
            )
    return rows


def run(load: Load) -> list[dict[str, float]]:
    """The backend with the stand-in engine.  Raises MissingTool."""
    if find_tritonserver() is None:
        raise MissingTool("nvidia-pytriton is not installed: no tritonserver")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        client = build_client()
        backends = make_backend_dir(compile_library(ROOT / "install/backends/slipstream"), scratch / "backends")
        add_model(scratch / "repository", "llm")
        request = write_request(scratch / "request.bin", "llm", load.num_tokens)
        return sweep(scratch / "repository", backends, client, request, load)


def report(description: str, run: Callable[[Load], list[dict[str, float]]]) -> int:
    """The command line of a benchmark: its options, and its rows as a table, or why it cannot run here."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    try:
        rows = run(Load(arguments.streams, arguments.tokens, arguments.repeats))
    except MissingTool as error:
        print(f"skipped: {error}")
        return 0
    print("| " + " | ".join(COLUMNS) + " |\n|" + "--:|" * len(COLUMNS))
    for row in rows:
        print("| " + " | ".join(f"{row[column]:.6g}" for column in COLUMNS) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(report(__doc__, run))
