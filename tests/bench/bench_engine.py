"""Slipstream in-process on one GPU: decode TPOT by batch, TTFT by prompt length, offline throughput, a profile.

    python tests/bench/bench_engine.py --shape llama3-8b --measure decode,prefill,throughput,profile --out ours.jsonl
    python tests/bench/bench_engine.py --set quantization=fp8 --set kv_cache_dtype=fp8 --rival vllm.jsonl

Random weights of the shape, random prompts, greedy, ignore_eos, no text, prefix cache off unless asked for. Prompts are
not spread over many steps for the sake of streams, so that the requests of a batch all decode at once; --set
max_mixed_step_ms=0 spreads them, as a server does. What the figures mean is said in measures.py; --rival reads another
engine's lines of the same form and adds ratios (above 1: we are faster).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from functools import partial
from itertools import cycle
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/bench"))

from adapters import names_of, write_adapter  # noqa: E402
from measures import (  # noqa: E402
    MEASURES,
    STREAMS,
    Measure,
    Prompt,
    Record,
    add_settings,
    emit,
    numbers,
    parser_of,
    run,
)
from shapes import shape_of  # noqa: E402
from slipstream.core.config_parse import config_from_values  # noqa: E402
from slipstream.core.request import Request  # noqa: E402
from slipstream.core.sampling_params import SamplingParams  # noqa: E402
from slipstream.engine.engine import Engine  # noqa: E402
from step_profile import measure_profile, profile_missed  # noqa: E402
from step_window import StepWindow  # noqa: E402

GIB = 1 << 30
TOKENIZER = ROOT / "models/slipstream-demo-code"  # an engine wants one; nothing is decoded


class EngineBench:
    """Our engine, stepped on this thread."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.shape = shape_of(arguments.shape, arguments.layers)
        self.temperature = arguments.temperature
        (folder / "config.json").write_text(json.dumps(self.shape.config()))
        settings: dict[str, object] = {
            "model": str(folder),
            "tokenizer": str(TOKENIZER),
            "load_format": "dummy",
            "enable_prefix_caching": False,
            "max_model_len": min(arguments.max_model_len, self.shape.max_len),
            "max_num_seqs": arguments.max_num_seqs,
            "max_num_batched_tokens": arguments.max_num_batched_tokens,
            "max_waiting_requests": 100_000,
            "max_mixed_step_ms": 1_000_000,
        }
        self.num_adapters = 0
        if arguments.adapters:
            most = max(arguments.adapters)
            adapter = str(write_adapter(folder / "adapter", self.shape, arguments.adapter_rank))
            settings |= {"enable_lora": True, "max_loras": most, "max_lora_rank": arguments.adapter_rank}
            settings |= {"lora_modules": json.dumps(dict.fromkeys(names_of(most), adapter))}
        settings.update(pair.split("=", 1) for pair in arguments.set)
        self.engine = Engine(config_from_values(settings))
        self.max_model_len = self.engine.max_model_len
        self.pool_tokens = self.engine.memory_plan.pool_tokens

    def submit(self, prompts: list[Prompt], num_output: int) -> list[Request]:
        params = SamplingParams(max_tokens=num_output, temperature=self.temperature, ignore_eos=True)
        names = cycle(names_of(self.num_adapters) or [""])
        return [self.engine.submit(Request(prompt, params, adapter_name=next(names)))[0] for prompt in prompts]

    def timed(self, prompts: list[Prompt], num_output: int, concurrency: int | None = None) -> float:
        start = time.perf_counter()
        requests = self.submit(prompts[:concurrency], num_output)
        while self.engine.has_work:
            num_ended = sum(output.finish_reason is not None for output in self.engine.step())
            requests += self.submit(prompts[len(requests) : len(requests) + num_ended], num_output)
        elapsed = time.perf_counter() - start
        self._check(requests, num_output)
        return elapsed

    def step_seconds(self, prompts: list[Prompt], short: int, long: int) -> float:
        requests, window, has_ended = self.submit(prompts, long), StepWindow(short), False
        while self.engine.has_work:
            outputs = self.engine.step()
            now = time.perf_counter()
            has_ended = has_ended or any(output.finish_reason is not None for output in outputs)
            window.see(now, has_ended, lambda: min(request.num_output_tokens for request in requests))
        self._check(requests, long)
        return window.seconds

    def _check(self, requests: list[Request], num_output: int) -> None:
        if self.engine.error is not None:
            raise self.engine.error
        assert [request.num_output_tokens for request in requests] == [num_output] * len(requests)
        assert not any(request.num_preemptions for request in requests), "preempted: the cache is too small"


def memory_of(engine: Engine) -> Record:
    """What the memory plan has for this rank, and what the driver has given away in all, in GiB; nothing of a CPU.

    before: given away when the plan was made.  over: used over planned.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    plan, (free, total) = engine.memory_plan, torch.cuda.mem_get_info()
    own, pool_bytes = plan, plan.pool_bytes
    if plan.stages:  # the plan is of the stage with the fewest blocks, this process the first one
        own, pool_bytes = plan.stages[0], plan.stages[0].pool_bytes(plan.num_blocks)
    sizes = {
        "before": total - plan.free_bytes,
        "weights": own.weight_bytes,
        "workspace": own.workspace_bytes,
        "pool": pool_bytes,
    }
    planned, used = sum(sizes.values()), total - free
    in_gib = {name: round(size / GIB, 2) for name, size in {**sizes, "planned": planned, "used": used}.items()}
    return {**in_gib, "over": round(used / planned, 4)}


def main() -> None:
    parser = parser_of(__doc__, accepted=(*MEASURES, "profile", "streams"))
    add_settings(parser)
    parser.add_argument("--profile-batches", type=numbers, default=[1, 64])
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        arguments.set += ["enable_prefix_caching=true"] * arguments.prefix_caching
        bench = EngineBench(arguments, Path(folder))
        phases = {name: round(seconds, 2) for name, seconds in bench.engine.start_up.seconds.items()}
        settings = {
            "engine": "slipstream",
            "shape": arguments.shape,
            "set": arguments.set,
            "adapters": arguments.adapters,
            "temperature": arguments.temperature,
        }
        load_s = round(time.perf_counter() - start, 2)
        setup = {"load_s": load_s, "phases": phases, "memory": memory_of(bench.engine)}
        emit({**settings, "what": "setup", **setup}, arguments.out)
        profile: Measure = measure_profile  # type: ignore[assignment]  # steps the engine itself
        missed = partial(profile_missed, bench, arguments.profile_below)
        run(bench, arguments, settings, {"profile": profile, "streams": STREAMS}, missed)
        emit({**settings, "what": "memory", **memory_of(bench.engine)}, arguments.out)


if __name__ == "__main__":
    main()
