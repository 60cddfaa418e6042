"""Slipstream through tritonserver: the same measurements as bench_engine, by gRPC streaming clients.

    python tests/bench/bench_triton.py --shape llama3-8b --measure decode,throughput --out served.jsonl
    python tests/bench/bench_triton.py --replicas 4 --clients 16 --measure throughput --num-prompts 1024
    python tests/bench/bench_triton.py --set quantization=fp8 --rival ours.jsonl --perf-analyzer 64

Every token is one streamed response with its text; clients are tritonclient processes on the same machine.
--perf-analyzer N also lets perf_analyzer (build/fetch_perf_analyzer.py) measure N concurrent streams.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/bench"), str(ROOT / "tests/support")]

from llm_server import backends_dir, missing_server, parameter  # noqa: E402
from measures import (  # noqa: E402
    MEASURES,
    STREAMS,
    Measure,
    Prompt,
    Record,
    add_settings,
    draw_prompts,
    emit,
    parser_of,
    run,
    seconds_by_difference,
)
from shapes import SHAPES, Shape  # noqa: E402
from stream_clients import StreamClients  # noqa: E402
from triton_server import TritonServer  # noqa: E402

PERF_ANALYZER = ROOT / "install/perf_analyzer/perf_analyzer"
DEFAULT_BLOCK_SIZE = 64
PERF_COLUMN = re.compile(r"Throughput: ([\d.]+) infer/sec")


class TritonBench:
    """The server with one model `llm`, and its clients."""

    def __init__(self, arguments: argparse.Namespace, server: TritonServer, clients: StreamClients) -> None:
        self.shape = SHAPES[arguments.shape]
        self.max_model_len = min(arguments.max_model_len, self.shape.max_len)
        blocks = sum(n for name, n in server.metrics().items() if name.startswith("slipstream_kv_blocks_total"))
        self.pool_tokens = int(blocks) * DEFAULT_BLOCK_SIZE
        self.server = server
        self._clients = clients

    def timed(self, prompts: list[Prompt], num_output: int, concurrency: int | None = None) -> float:
        return self._clients.timed(prompts, num_output, concurrency)

    def step_seconds(self, prompts: list[Prompt], short: int, long: int) -> float:
        return seconds_by_difference(self, prompts, short, long)


def write_model(folder: Path, shape: Shape) -> Path:
    """A checkpoint folder without weights: config.json, and a tokenizer whose every token is a word."""
    from tokenizers import Tokenizer, decoders, models

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    vocab = {f"Ġw{token_id}": token_id for token_id in range(shape.vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_repository(folder: Path, model: Path, arguments: argparse.Namespace, replicas: int = 1) -> Path:
    """One model `llm` of so many engines, each with the next GPU."""
    (folder / "llm/1").mkdir(parents=True)
    parameters: dict[str, object] = {
        "model": model,
        "load_format": "dummy",
        "enable_prefix_caching": str(arguments.prefix_caching).lower(),
        "max_model_len": min(arguments.max_model_len, SHAPES[arguments.shape].max_len),
        "max_num_seqs": arguments.max_num_seqs,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
        "max_waiting_requests": 100_000,
    }
    parameters.update(pair.split("=", 1) for pair in arguments.set)
    text = f'name: "llm"\nbackend: "slipstream"\ninstance_group {{ count: {replicas} kind: KIND_MODEL }}\n'
    text += "".join(parameter(*item) for item in parameters.items())
    (folder / "llm/config.pbtxt").write_text(text)
    return folder


def measure_perf_analyzer(bench: TritonBench, arguments: argparse.Namespace) -> Iterator[Record]:
    """Requests/s of perf_analyzer at one concurrency, as tokens/s."""
    if not arguments.perf_analyzer:
        return
    num_input, num_output = arguments.contexts[0], arguments.perf_output_len
    prompt = draw_prompts(bench.shape, 1, num_input)[0]
    data = {
        "input_ids": {"content": prompt, "shape": [num_input]},
        "max_tokens": [num_output],
        "temperature": [0.0],
        "ignore_eos": [True],
        "stream": [True],
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"data": [data]}, file)
        file.flush()
        load = f"--concurrency-range={arguments.perf_analyzer} --request-count={2 * arguments.perf_analyzer}"
        how = f"-m llm -i grpc --streaming --async -u {bench.server.grpc_url} --input-data={file.name} {load}"
        command = [str(PERF_ANALYZER), *how.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    found = PERF_COLUMN.search(done.stdout)
    if found is None:
        raise RuntimeError(f"perf_analyzer: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    rate = float(found.group(1))
    yield {
        "what": "perf_analyzer",
        "concurrency": arguments.perf_analyzer,
        "input_len": num_input,
        "output_len": num_output,
        "requests_per_s": rate,
        "out_tok_s": round(rate * num_output, 1),
    }


def main() -> None:
    parser = parser_of(__doc__, accepted=(*MEASURES, "streams"))
    add_settings(parser)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--clients", type=int, default=8, help="client processes")
    parser.add_argument("--replicas", type=int, default=1, help="engines of the model, each on a GPU of its own")
    parser.add_argument("--perf-analyzer", type=int, default=0, metavar="STREAMS")
    parser.add_argument("--perf-output-len", type=int, default=128)
    arguments = parser.parse_args()
    backends = backends_dir()
    if backends is None or missing_server():
        raise SystemExit(missing_server())
    if arguments.perf_analyzer and not PERF_ANALYZER.exists():
        raise SystemExit(f"{PERF_ANALYZER}: not there; run build/fetch_perf_analyzer.py")
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name) / "model", SHAPES[arguments.shape])
        repository = write_repository(Path(name) / "repository", model, arguments, arguments.replicas)
        server = TritonServer(repository, backends, start_timeout_s=300)
        with server, StreamClients(server.grpc_url, arguments.clients) as clients:
            bench = TritonBench(arguments, server, clients)
            settings = {"engine": "slipstream+triton", "shape": arguments.shape, "set": arguments.set}
            settings["replicas"] = arguments.replicas
            perf: Measure = measure_perf_analyzer  # type: ignore[assignment]  # asks for the server's address
            if arguments.perf_analyzer:
                arguments.measure += ",perf_analyzer"
            emit({**settings, "what": "setup", "clients": arguments.clients}, arguments.out)
            run(bench, arguments, settings, {"perf_analyzer": perf, "streams": STREAMS})


if __name__ == "__main__":
    main()
