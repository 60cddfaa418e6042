"""Slipstream in-process on one GPU: decode TPOT by batch, TTFT by prompt length, offline throughput, a profile.

    python tests/bench/bench_engine.py --shape llama3-8b --measure decode,prefill,throughput --out ours.jsonl
    python tests/bench/bench_engine.py --set quantization=fp8 --set kv_cache_dtype=fp8 --rival vllm.jsonl

Random weights of the shape, random prompts, greedy, ignore_eos, no text, prefix cache off. TPOT is the difference
of two runs that differ only in output length, over 128 steps; TTFT is one prompt with max_tokens=1. `limit` is the
share of the physical limit: the bytes that a step must read at 4.3 TB/s, or its products at 790 (bf16) or 1600 (fp8)
TFLOP/s, whichever is longer, at the context before the timed steps. One JSON object per line; --rival reads another
engine's lines of the same form and adds ratios (above 1: we are faster).
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.config_parse import config_from_values
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.runtime.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "models/slipstream-demo-code"  # an engine wants one; nothing is decoded
BYTES_PER_S = 4.3e12
FLOPS_PER_S = {2.0: 790e12, 1.0: 1600e12}
WARM_UP = ((4, 256, 16), (1, 2048, 4))  # prompts, their length, output length
Record = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    rope_theta: float = 1e4
    max_len: int = 65536
    head_dim: int = 128

    @property
    def linear_parameters(self) -> int:
        attention = 2 * self.hidden * (self.q_heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    def limit_s(self, batch: int, context: int, weight_bytes: float, kv_bytes: float) -> float:
        """Least seconds of a decode step; the head stays in bf16."""
        head = self.hidden * self.vocab
        kv = 2 * self.layers * self.kv_heads * self.head_dim * kv_bytes * context * batch
        moved = self.linear_parameters * weight_bytes + 2 * head + kv
        attention = 4 * self.q_heads * self.head_dim * context * self.layers * batch
        flops = 2 * self.linear_parameters * batch / FLOPS_PER_S[max(1.0, weight_bytes)]
        return max(moved / BYTES_PER_S, flops + (2 * head * batch + attention) / FLOPS_PER_S[2.0])

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_len,
        }


SHAPES = {
    "llama3-8b": Shape(4096, 32, 32, 8, 14336, 128256, 5e5, 131072),
    "baichuan2-13b": Shape(5120, 40, 40, 40, 13696, 125696),  # its matrix shapes in the Llama graph (no ALiBi)
    "llama3-70b": Shape(8192, 80, 64, 8, 28672, 128256, 5e5, 131072),
    "tiny": Shape(1024, 2, 8, 2, 2048, 32000),
    "demo": Shape(384, 6, 6, 2, 1024, 8192, 1e4, 2048, 64),
}


class Bench:
    """An engine, and the loops that time it."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.shape = SHAPES[arguments.shape]
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
        }
        settings.update(pair.split("=", 1) for pair in arguments.set)
        self.engine = Engine(config_from_values(settings))
        self._dice = random.Random(0)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        top = min(self.shape.vocab, 30000)
        return [[self._dice.randrange(10, top) for _ in range(length)] for _ in range(count)]

    def submit(self, prompts: list[list[int]], num_output: int) -> list[Request]:
        params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        return [self.engine.submit(Request(prompt, params))[0] for prompt in prompts]

    def timed(self, prompts: list[list[int]], num_output: int) -> float:
        start = time.perf_counter()
        requests = self.submit(prompts, num_output)
        while self.engine.has_work:
            self.engine.step()
        elapsed = time.perf_counter() - start
        if self.engine.error is not None:
            raise self.engine.error
        assert all(request.num_output_tokens == num_output for request in requests)
        assert not any(request.num_preemptions for request in requests), "preempted: the cache is too small"
        return elapsed


def measure_prefill(bench: Bench, arguments: argparse.Namespace) -> Iterator[Record]:
    for length in arguments.prefill_lens:
        if length < bench.engine.max_model_len:
            bench.timed(bench.prompts(1, length), 1)
            times = [bench.timed(bench.prompts(1, length), 1) for _ in range(arguments.repeats)]
            median_ms = statistics.median(times) * 1e3
            yield {"what": "prefill", "batch": 1, "input_len": length, "ttft_ms": round(median_ms, 3)}


def measure_decode(bench: Bench, arguments: argparse.Namespace) -> Iterator[Record]:
    short, long, context = arguments.decode_short, arguments.decode_long, arguments.decode_input_len
    for batch in arguments.batches:
        if batch * (context + long) > bench.engine.memory_plan.pool_tokens:
            yield {"what": "decode", "batch": batch, "skipped": "the KV cache does not hold it"}
            continue
        prompts = bench.prompts(batch, context)
        bench.timed(prompts, 8)
        steps = [
            (bench.timed(prompts, long) - bench.timed(prompts, short)) / (long - short)
            for _ in range(arguments.decode_repeats)
        ]
        seconds = statistics.median(steps)
        limit = bench.shape.limit_s(batch, context, arguments.weight_bytes, arguments.kv_bytes)
        yield {
            "what": "decode",
            "batch": batch,
            "context": context,
            "tpot_ms": round(seconds * 1e3, 4),
            "tpot_ms_all": [round(step * 1e3, 4) for step in steps],
            "out_tok_s": round(batch / seconds, 1),
            "limit": round(limit / seconds, 3),
        }


def measure_throughput(bench: Bench, arguments: argparse.Namespace) -> Iterator[Record]:
    count, num_input, num_output = arguments.num_prompts, arguments.input_len, arguments.output_len
    prompts = bench.prompts(count, num_input)
    bench.timed(prompts[:16], 8)
    elapsed = bench.timed(prompts, num_output)
    yield {
        "what": "throughput",
        "num_prompts": count,
        "input_len": num_input,
        "output_len": num_output,
        "elapsed_s": round(elapsed, 3),
        "out_tok_s": round(count * num_output / elapsed, 1),
        "total_tok_s": round(count * (num_input + num_output) / elapsed, 1),
    }


def measure_profile(bench: Bench, arguments: argparse.Namespace) -> Iterator[Record]:
    """Where the time of a decode step goes: kernels by name, the GPU's idle share, the engine thread's own time."""
    from torch.profiler import ProfilerActivity, profile

    for batch in arguments.profile_batches:
        requests = bench.submit(bench.prompts(batch, arguments.decode_input_len), 100)
        while min(request.num_output_tokens for request in requests) < 20:
            bench.engine.step()
        cpu, wall = time.thread_time(), time.perf_counter()
        for _ in range(20):
            bench.engine.step()
        host_us, step_us = (
            (now - then) / 20 * 1e6 for now, then in ((time.thread_time(), cpu), (time.perf_counter(), wall))
        )
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(20):
                bench.engine.step()
        while bench.engine.has_work:
            bench.engine.step()
        yield {"what": "profile", "batch": batch, "step_us": round(step_us), "host_cpu_us": round(host_us)} | _summary(
            profiler
        )


def _summary(profiler: Any, num_steps: int = 20) -> Record:
    """Busy is the union of all kernels' and copies' spans; a gap is a time of no kernel."""
    events = [event for event in profiler.events() if str(event.device_type).endswith("CUDA")]
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    if not spans:
        return {"kernels": {}}
    by_name: dict[str, list[float]] = {}
    gaps, end = [], spans[0][0]
    for start, stop, name in spans:
        if start > end:
            gaps.append(start - end)
        end = max(end, stop)
        by_name.setdefault(name[:70], []).append(stop - start)
    window = end - spans[0][0]
    largest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:25]
    return {
        "idle": round(sum(gaps) / window, 4),
        "idle_in_gaps_above_4_us": round(sum(gap for gap in gaps if gap > 4) / window, 4),
        "longest_gaps_us": [round(gap, 1) for gap in sorted(gaps)[-5:]],
        "kernels_per_step": round(len(spans) / num_steps, 1),
        "us_per_step": {
            name: [round(sum(times) / num_steps, 1), round(len(times) / num_steps, 1)] for name, times in largest
        },
    }


MEASURES = {
    "prefill": measure_prefill,
    "decode": measure_decode,
    "throughput": measure_throughput,
    "profile": measure_profile,
}


def add_ratio(record: Record, rival: list[Record]) -> None:
    """ratio: how many times faster than the rival's line of the same measurement."""
    keys = ("what", "batch", "input_len", "num_prompts", "output_len")
    for other in rival:
        if all(other.get(key) == record.get(key) for key in keys):
            for name in ("tpot_ms", "ttft_ms", "elapsed_s"):
                if name in record and name in other:
                    record["ratio"] = round(other[name] / record[name], 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"type": lambda text: [int(number) for number in text.split(",") if number]}
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    parser.add_argument("--measure", default="decode,prefill,throughput", help=",".join(MEASURES))
    parser.add_argument("--set", action="append", default=[], metavar="PARAMETER=VALUE", help="as in config.pbtxt")
    parser.add_argument("--batches", default=[1, 8, 32, 64, 128, 256], **numbers)
    parser.add_argument("--profile-batches", default=[1, 64], **numbers)
    parser.add_argument("--prefill-lens", default=[1024, 8192, 32768], **numbers)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--decode-input-len", type=int, default=1024)
    parser.add_argument("--decode-short", type=int, default=32)
    parser.add_argument("--decode-long", type=int, default=160)
    parser.add_argument("--decode-repeats", type=int, default=2)
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=1024)
    parser.add_argument("--max-model-len", type=int, default=33792)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--weight-bytes", type=float, default=2.0, help="per weight, for the limit")
    parser.add_argument("--kv-bytes", type=float, default=2.0, help="per cached number, for the limit")
    parser.add_argument("--rival", type=Path, help="JSON lines of another engine")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    rival = [json.loads(line) for line in arguments.rival.read_text().splitlines()] if arguments.rival else []
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        bench = Bench(arguments, Path(folder))
        phases = {name: round(seconds, 2) for name, seconds in bench.engine.start_up.seconds.items()}
        settings = {"engine": "slipstream", "shape": arguments.shape, "set": arguments.set}
        _emit({"what": "setup", "load_s": round(time.perf_counter() - start, 2), "phases": phases}, settings, arguments)
        for count, length, num_output in WARM_UP:
            longest = bench.engine.max_model_len - num_output
            bench.timed(bench.prompts(count, min(length, longest)), num_output)
        for name in arguments.measure.split(","):
            for record in MEASURES[name](bench, arguments):
                add_ratio(record, rival)
                _emit(record, settings, arguments)


def _emit(record: Record, settings: Record, arguments: argparse.Namespace) -> None:
    line = json.dumps({**settings, **record})
    print(line, flush=True)
    if arguments.out:
        with arguments.out.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
