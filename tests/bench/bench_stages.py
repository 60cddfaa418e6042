"""What steps in several stages at once gain: seconds for prompts with one step underway, and with one for each stage.

    OMP_NUM_THREADS=1 python tests/bench/bench_stages.py [--stages 2] [--prompts 24] [--length 256] [--repeats 6]

A random model of 8 layers on a CPU, one thread a stage. Each prompt is a step, and gets one token. Needs a core for
each stage, and nothing else on them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/support")]

from engine_driver import GREEDY, make_engine, run_all  # noqa: E402
from slipstream.core.config import ParallelConfig  # noqa: E402
from tiny_model import make_tiny_llama  # noqa: E402


def seconds(model: Path, overlap: str, options: argparse.Namespace) -> list[float]:
    draw = random.Random(1)
    parallel = ParallelConfig(pipeline_parallel_size=options.stages)
    scheduler = {"overlap_scheduling": overlap, "max_num_batched_tokens": options.length}
    engine = make_engine(model, {"num_threads": options.stages}, scheduler=scheduler, parallel=parallel)
    found = []
    for _ in range(1 + options.repeats):  # the first time warms up
        prompts = [[draw.randrange(3, 90) for _ in range(options.length)] for _ in range(options.prompts)]
        start = time.monotonic()
        run_all(engine, prompts, replace(GREEDY, max_tokens=1))
        found.append(time.monotonic() - start)
    engine.close()
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--length", type=int, default=256, help="tokens of a prompt, at most 500")
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_llama(Path(folder), num_layers=8, hidden_size=1024)
        for overlap in ("off", "auto"):
            found = seconds(model, overlap, options)
            median, least, most = statistics.median(found), min(found), max(found)
            print(f"overlap_scheduling {overlap:<5} {median:.2f} s ({least:.2f} to {most:.2f})", flush=True)


if __name__ == "__main__":
    main()
