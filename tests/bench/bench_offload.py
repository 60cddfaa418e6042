"""What host memory behind the KV pool is worth: TTFT of a prefix gone cold, brought back or computed again. One GPU.

    python tests/bench/bench_offload.py --shape llama3-8b --lengths 1024,8192,32768

For each length: a prompt is served, another of the largest length pushes it out of the pool, and it is served again.
Random weights; greedy; max_tokens=1. One JSON object per line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/bench"))

from bench_engine import EngineBench  # noqa: E402
from measures import add_settings, draw_prompts, emit, numbers, parser_of  # noqa: E402

BLOCK_SIZE = 64


def ttft_again(bench: EngineBench, length: int, repeats: int) -> float:
    """Median seconds to the first token of a prompt that was served before and pushed out since."""
    times = []
    for seed in range(repeats + 1):
        [cold] = draw_prompts(bench.shape, 1, length, 2 * seed)
        flood = draw_prompts(bench.shape, 1, bench.max_model_len - 1, 2 * seed + 1)
        bench.timed([cold], 1)
        bench.timed(flood, 1)
        times.append(bench.timed([cold], 1))
    return statistics.median(times[1:])  # the first compiled kernels


def main() -> None:
    parser = parser_of(__doc__)
    add_settings(parser)
    parser.add_argument("--lengths", type=numbers, default=[1024, 8192, 32768])
    parser.add_argument("--host-bytes", type=int, default=16 << 30)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    arguments = parser.parse_args()
    blocks = -(-arguments.max_model_len // BLOCK_SIZE)
    common = [f"num_blocks={blocks + 2}", "enable_prefix_caching=true", *arguments.set]
    seconds: dict[int, list[float]] = {length: [] for length in arguments.lengths}
    for host_bytes in (0, arguments.host_bytes):
        run = argparse.Namespace(**{**vars(arguments), "set": [*common, f"kv_cache_host_memory_bytes={host_bytes}"]})
        with tempfile.TemporaryDirectory() as folder:
            bench = EngineBench(run, Path(folder))
            for length in arguments.lengths:
                seconds[length].append(ttft_again(bench, length, arguments.repeats))
            host = bench.engine.scheduler.cache.host
            if host is not None:
                print(json.dumps({"stored_blocks": host.num_stored, "loaded_blocks": host.num_loaded}))
            bench.engine.close()
    for length, (computed, loaded) in seconds.items():
        record = {"what": "offload", "shape": arguments.shape, "input_len": length, "gain": round(computed / loaded, 2)}
        record |= {"computed_ms": round(computed * 1e3, 2), "loaded_ms": round(loaded * 1e3, 2)}
        emit(record, arguments.out)


if __name__ == "__main__":
    main()
