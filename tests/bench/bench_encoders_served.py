"""Texts per second of an encoder through tritonserver, a text a request: with dynamic batching and one by one.

    python tests/bench/bench_encoders_served.py                     # random weights in MiniLM-L6's shape
    python tests/bench/bench_encoders_served.py --model FOLDER_OR_ID --concurrency 1,64 --max-batch 256 --instances 2

The repository's `embedding` on the real server, and perf_analyzer (build/fetch_perf_analyzer.py) as its clients over
gRPC. Rows by concurrency: requests under way, texts per second, median latency, and the batches that Triton made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "backend"), str(ROOT / "tests/support"), str(ROOT / "tests/bench")]

from bench_encoders import Lengths, draw_texts, parse_lengths  # noqa: E402
from llm_server import backends_dir, missing_server  # noqa: E402
from slipstream.encoders.checkpoint import find_checkpoint, read_checkpoint  # noqa: E402
from slipstream.encoders.encoder import Encoder  # noqa: E402
from slipstream.encoders.open_runtime import open_runtime  # noqa: E402
from slipstream.encoders.runtime import RuntimeSettings  # noqa: E402
from tiny_encoders import write_random_minilm  # noqa: E402
from triton_server import TritonServer  # noqa: E402

PERF_ANALYZER = ROOT / "install/perf_analyzer/perf_analyzer"
CONFIG = ROOT / "model_repository/embedding/config.pbtxt"
MODEL_FILE = ROOT / "model_repository/embedding/1/model.py"
RATE, MEDIAN = re.compile(r"Throughput: ([\d.]+) infer/sec"), re.compile(r"p50 latency: (\d+) usec")
KINDS = ("batched", "single")


def write_model(repository: Path, name: str, folder: Path, arguments: argparse.Namespace) -> None:
    """The repository's `embedding` with another checkpoint, as many instances and as large batches as asked for."""
    text = re.sub(r'parameters \{ key: "model".*\n', "", CONFIG.read_text())
    text = text.replace('name: "embedding"', f'name: "{name}"', 1)
    text = re.sub(r"max_batch_size: \d+", f"max_batch_size: {arguments.max_batch}", text)
    text = re.sub(r"count: \d+", f"count: {arguments.instances}", text)
    if name == "single":
        text = re.sub(r"dynamic_batching .*\n", "", text)
    text += f'parameters {{ key: "model" value {{ string_value: "{folder}" }} }}\n'
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(text)
    (repository / name / "1/model.py").write_text(MODEL_FILE.read_text())


def write_requests(path: Path, folder: Path, lengths: Lengths) -> None:
    checkpoint = read_checkpoint(folder)
    encoder = Encoder(checkpoint, open_runtime(RuntimeSettings("torch", "cpu"), checkpoint))
    texts = draw_texts(encoder, 256, lengths)
    path.write_text(json.dumps({"data": [{"text": [text]} for text in texts]}))


def load(server: TritonServer, model: str, requests: Path, concurrency: int, seconds: float) -> tuple[float, float]:
    """(texts/s, median latency in ms).  Raises RuntimeError with perf_analyzer's own words."""
    interval = f"--measurement-interval={seconds * 1e3:.0f} --stability-percentage=999 --max-trials=3"
    how = f"-m {model} -i grpc --async -u {server.grpc_url} --input-data={requests} {interval}"
    command = [str(PERF_ANALYZER), *how.split(), f"--concurrency-range={concurrency}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    rate, median = RATE.search(done.stdout), MEDIAN.search(done.stdout)
    if rate is None or median is None:
        raise RuntimeError(f"perf_analyzer: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(rate.group(1)), int(median.group(1)) / 1e3


def counts(server: TritonServer, model: str) -> tuple[int, int]:
    """Texts and runs since the start."""
    stats = json.loads(server.get(f"/v2/models/{model}/stats")[1])["model_stats"][0]
    return int(stats["inference_count"]), int(stats["execution_count"])


def measure(server: TritonServer, requests: Path, lengths: Lengths, arguments: argparse.Namespace) -> None:
    for model in arguments.kinds:
        for concurrency in arguments.concurrency:
            before = counts(server, model)
            rate, median_ms = load(server, model, requests, concurrency, arguments.seconds)
            texts, runs = (after - earlier for after, earlier in zip(counts(server, model), before))
            cells = f"{rate:.0f} | {median_ms:.2f} | {texts / max(runs, 1):.1f}"
            print(f"| {model} | {lengths} | {concurrency} | {cells} |", flush=True)


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="package:NAME/FOLDER, a folder or a hub id; default: random weights")
    parser.add_argument("--concurrency", default="1,16,64,256", help="requests under way (%(default)s)")
    parser.add_argument("--tokens", default="20-60", help="lengths of texts (%(default)s)")
    parser.add_argument("--max-batch", type=int, default=64, help="as of the repository's model (%(default)s)")
    parser.add_argument("--instances", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (%(default)s)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="%(default)s")
    arguments = parser.parse_args(given)
    arguments.concurrency = [int(size) for size in arguments.concurrency.split(",")]
    arguments.tokens = [parse_lengths(text) for text in arguments.tokens.split(",")]
    arguments.kinds = arguments.kinds.split(",")
    return arguments


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(given)
    missing = missing_server() or ("" if PERF_ANALYZER.exists() else "run build/fetch_perf_analyzer.py")
    if missing:
        raise SystemExit(missing)
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        folder = write_random_minilm(base / "minilm")
        if arguments.model:
            folder = find_checkpoint(arguments.model, Path.cwd())
        for kind in arguments.kinds:
            write_model(base / "repository", kind, folder, arguments)
        print(
            "| model | tokens | under way | texts/s | median ms | texts a batch |\n|---|--:|--:|--:|--:|--:|",
            flush=True,
        )
        # Python models run in the environment of the first python3 in PATH
        path = {"PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ.get('PATH', '')}"}
        with TritonServer(base / "repository", backends_dir(), start_timeout_s=120, env=path) as server:
            for lengths in arguments.tokens:
                write_requests(base / "requests.json", folder, lengths)
                measure(server, base / "requests.json", lengths, arguments)


if __name__ == "__main__":
    main()
