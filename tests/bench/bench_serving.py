"""Rate and CPU of streamed responses through everything but the model: real server, real engine process, null model.

    python tests/bench/bench_serving.py [--streams 1 16 64 256] [--tokens 100] [--repeats 3]

`load_format: null` computes nothing and emits a fixed token, so this is what requests, scheduler, detokenising, frames
and the server cost. Client and columns are bench_backend.py's. Target: at least 20 000 responses/s at 64 streams.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/bench")]

from bench_backend import Load, MissingTool, build_client, report, sweep  # noqa: E402
from llm_server import backends_dir, missing_server, parameter  # noqa: E402

CHECKPOINT = ROOT / "models/slipstream-demo-code"


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


def write_repository(folder: Path) -> Path:
    """One model, `llm`, that computes nothing."""
    (folder / "llm/1").mkdir(parents=True)
    parameters = {"model": CHECKPOINT, "load_format": "null", "num_blocks": 4096, "max_num_seqs": 512}
    text = 'backend: "slipstream"\n' + "".join(parameter(key, value) for key, value in parameters.items())
    (folder / "llm/config.pbtxt").write_text(text)
    return folder


def run(load: Load) -> list[dict[str, float]]:
    """The whole chain with the null model. Raises MissingTool."""
    backends = backends_dir()
    if backends is None or missing_server():
        raise MissingTool(missing_server())
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        client = build_client()
        repository = write_repository(scratch / "repository")
        request = write_request(scratch / "request.bin", load.num_tokens)
        return sweep(repository, backends, client, request, load)


if __name__ == "__main__":
    raise SystemExit(report(__doc__, run))
