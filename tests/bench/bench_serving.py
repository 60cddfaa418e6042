"""Rate and CPU of streamed responses through everything but the model: real server, real engine process, null model.

    python tests/bench/bench_serving.py [--streams 1 16 64 256] [--tokens 100] [--repeats 3]

`load_format: null` computes nothing and emits a fixed token, so this is what requests, scheduler, detokenising, frames
and the server cost. Client and columns are bench_backend.py's. Target: at least 20 000 responses/s at 64 streams.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/bench")]

from bench_backend import MissingTool, build_client, measure  # noqa: E402
from llm_server import backends_dir, parameter  # noqa: E402
from triton_server import TritonServer, find_tritonserver  # noqa: E402

CHECKPOINT = ROOT / "models/slipstream-demo-code"
COLUMNS = ("streams", "responses_per_s", "server_us", "engine_us", "first_ms_p50", "next_ms_p50", "next_ms_p99")


def write_request(path: Path, num_tokens: int) -> Path:
    """A serialised ModelInferRequest as the vLLM backend's clients send it."""
    from tritonclient.grpc import service_pb2

    sampling = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    tensors = (("text_input", b"def f(x):"), ("sampling_parameters", json.dumps(sampling).encode()))
    request = service_pb2.ModelInferRequest(model_name="llm")
    for name, value in tensors:
        request.inputs.add(name=name, datatype="BYTES", shape=[1])
        request.raw_input_contents.append(len(value).to_bytes(4, "little") + value)
    request.inputs.add(name="stream", datatype="BOOL", shape=[1])
    request.raw_input_contents.append(b"\x01")
    request.outputs.add(name="text_output")
    path.write_bytes(request.SerializeToString())
    return path


def run(stream_counts: list[int], num_tokens: int, repeats: int) -> list[dict[str, float]]:
    """Medians over `repeats` runs for each number of streams. Raises MissingTool."""
    backends = backends_dir()
    if find_tritonserver() is None or backends is None:
        raise MissingTool("no tritonserver or no install tree: run `make assemble`")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        client = build_client(scratch)
        (scratch / "repository/llm/1").mkdir(parents=True)
        parameters = {"model": CHECKPOINT, "load_format": "null", "num_blocks": 4096, "max_num_seqs": 512}
        config = 'backend: "slipstream"\n' + "".join(parameter(key, value) for key, value in parameters.items())
        (scratch / "repository/llm/config.pbtxt").write_text(config)
        request = write_request(scratch / "request.bin", num_tokens)
        rows = []
        with TritonServer(scratch / "repository", backends) as server:
            measure(server, client, request, 16, num_tokens)  # warm up
            for num_streams in stream_counts:
                runs = [measure(server, client, request, num_streams, num_tokens) for _ in range(repeats)]
                medians = {column: statistics.median(one[column] for one in runs) for column in runs[0]}
                rows.append({"streams": num_streams, **medians})
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    try:
        rows = run(arguments.streams, arguments.tokens, arguments.repeats)
    except MissingTool as error:
        print(f"skipped: {error}")
        return 0
    print("| " + " | ".join(COLUMNS) + " |\n|" + "--:|" * len(COLUMNS))
    for row in rows:
        print("| " + " | ".join(f"{row[column]:.6g}" for column in COLUMNS) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
