"""Start engines of real shapes with dummy weights: seconds to ready by phase, and planned memory beside the driver's.

    python tests/bench/bench_start.py --shapes llama3-8b,gpt-oss-20b --set kv_cache_dtype=fp8 --out start.jsonl

Each engine has a process of its own on an otherwise idle GPU. ready, peak: the plan's parts and what the driver has
given away in all, as nvidia-smi says, when the engine is ready, and after the largest prompt that a step takes and a
full batch of decodes (bench_engine.memory_of). One JSON object per line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/bench"))

from measures import add_settings, draw_prompts  # noqa: E402
from shapes import SHAPES  # noqa: E402

MAX_SECONDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(name for name in SHAPES if name not in ("tiny", "demo")))
    add_settings(parser)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(start(arguments)), flush=True)
        return
    shapes = arguments.shapes.split(",")
    if unknown := sorted(set(shapes) - set(SHAPES)):
        parser.error(f"--shapes: {', '.join(unknown)}; accepted: {', '.join(SHAPES)}")
    for shape in shapes:
        line = json.dumps({"shape": shape, "set": arguments.set} | in_child(shape))
        print(line, flush=True)
        if arguments.out is not None:
            with arguments.out.open("a") as out:
                out.write(line + "\n")


def in_child(shape: str) -> dict[str, object]:
    """What a process of its own found, or its last words."""
    command = [sys.executable, __file__, *sys.argv[1:], "--shapes", shape, "--child"]
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_SECONDS)
    except subprocess.TimeoutExpired:
        return {"failed": f"no end after {MAX_SECONDS} s"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:]}
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found | {"process_s": round(time.monotonic() - began, 1)}


def start(arguments: argparse.Namespace) -> dict[str, object]:
    """Start one shape in this process. Returns its record."""
    from bench_engine import EngineBench, memory_of

    arguments.shape, arguments.layers, arguments.temperature, arguments.adapters = arguments.shapes, 0, 0.0, []
    with tempfile.TemporaryDirectory() as folder:
        bench = EngineBench(arguments, Path(folder))
        phases = bench.engine.start_up.seconds
        ready = memory_of(bench.engine)
        longest = min(arguments.max_num_batched_tokens, bench.max_model_len - 2)
        bench.timed(draw_prompts(bench.shape, 1, longest), 2)
        bench.timed(draw_prompts(bench.shape, arguments.max_num_seqs, 64), 4)
        return {
            "ready_s": round(sum(phases.values()), 1),
            "phases": {name: round(seconds, 1) for name, seconds in phases.items()},
            "ready": ready,
            "peak": memory_of(bench.engine),
        }


if __name__ == "__main__":
    main()
