"""Long contexts on one GPU: TTFT of a long prompt, TPOT behind it, and what it does to streams that decode meanwhile.

    python tests/bench/bench_long_context.py --length 196608 --set quantization=fp8 --set kv_cache_dtype=fp8
    python tests/bench/bench_long_context.py --measure beside --length 131072 --streams 32 --limits 0,1024,256

Random weights of the shape, random prompts, greedy. ttft: one prompt, computed in full. tpot: decodes behind contexts
that are registered as cached but never computed, as their values do not change the time. beside: the time between two
tokens of streams, quiet and while a prompt is computed, for values of max_mixed_prefill_tokens, max_mixed_step_ms and
max_mixed_step_ratio. Contexts of the streams grow by a token a step, so they are measured before and behind a prompt,
and p99_ratio is that of gaps over the quiet p99 of their time, taken to grow evenly.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "bench"))
sys.path.insert(0, str(TESTS / "support"))

from bench_engine import EngineBench  # noqa: E402
from measures import Record, add_settings, draw_prompts, emit, numbers, parser_of  # noqa: E402
from open_loop import percentile  # noqa: E402
from registered_prefix import register_prefix  # noqa: E402
from slipstream.core.layered_prefill import LayeredPrefill  # noqa: E402
from slipstream.core.prefill_budget import PrefillBudget, StepPace  # noqa: E402
from slipstream.core.request import Request  # noqa: E402

NUM_WARM = 8  # steps
NUM_DECODED = 72  # steps that tpot times


def measure_ttft(bench: EngineBench, arguments: argparse.Namespace) -> Iterator[Record]:
    """Time to the first token of a second prompt: the first, of 4,096 tokens, compiles what such lengths need."""
    bench.timed(draw_prompts(bench.shape, 1, min(4096, arguments.length - 1), seed=7), 1)
    seconds = bench.timed(draw_prompts(bench.shape, 1, arguments.length - 1), 1)
    yield {"what": "ttft", "batch": 1, "input_len": arguments.length - 1, "ttft_ms": round(seconds * 1e3, 1)}


def measure_tpot(bench: EngineBench, arguments: argparse.Namespace) -> Iterator[Record]:
    num_output = NUM_WARM + NUM_DECODED
    context = arguments.length - num_output
    for batch in arguments.batches:
        if batch * arguments.length > bench.pool_tokens:
            yield {"what": "tpot", "batch": batch, "context": context, "skipped": "the KV cache does not hold it"}
            continue
        prompts = draw_prompts(bench.shape, batch, context, seed=batch)
        for prompt in prompts:
            register_prefix(bench.engine.scheduler.cache, prompt)
        seconds = bench.step_seconds(prompts, NUM_WARM, num_output)
        bytes_per_s = arguments.memory_tb_s * 1e12
        limit = bench.shape.limit_s(batch, context, arguments.weight_bytes, arguments.kv_bytes, bytes_per_s)
        yield {"what": "tpot", "batch": batch, "context": context, "tpot_ms": round(seconds * 1e3, 3),
               "limit": round(limit / seconds, 3)}  # fmt: skip


def decode(bench: EngineBench, requests: list[Request], num_tokens: int) -> None:
    """Until every request has so many tokens of output, or has ended."""
    step_until(bench, lambda: all(one.num_output_tokens >= num_tokens or one.is_finished for one in requests))


def step_until(bench: EngineBench, is_over: Callable[[], bool]) -> None:
    while not is_over():
        bench.engine.step()
        if bench.engine.error is not None:
            raise bench.engine.error


def measure_beside(bench: EngineBench, arguments: argparse.Namespace) -> Iterator[Record]:
    """Streams keep decoding through all limits; their contexts grow by a token a step."""
    streams = bench.submit(draw_prompts(bench.shape, arguments.streams, arguments.stream_len), arguments.stream_tokens)
    decode(bench, streams, NUM_WARM)
    scheduler, length = bench.engine.scheduler, (arguments.beside_length or arguments.length) - 2
    settings = [(limit, arguments.step_ms[0], 0.0) for limit in arguments.limits]
    settings += [(arguments.limits[0], step_ms, 0.0) for step_ms in arguments.step_ms[1:]]
    settings += [(arguments.limits[0], 0, ratio) for ratio in arguments.ratios]
    for seed, (limit, step_ms, ratio) in enumerate(settings):
        most = limit or scheduler.config.max_num_batched_tokens
        pace = StepPace(step_ms * 1e-3, ratio)
        layered = LayeredPrefill(bench.engine.spec.num_layers)
        scheduler.prefill_budget = PrefillBudget(most, bench.engine.spec.attention_parity, pace, layered=layered)
        [warm] = bench.submit(draw_prompts(bench.shape, 1, min(2048, length), 1000 + seed), 1)
        gaps(bench, streams[0], until=warm)  # what a token takes is known in a server that has served
        quiet = gaps(bench, streams[0], arguments.quiet_steps)
        [tokens] = draw_prompts(bench.shape, 1, length, 2000 + seed)  # not in the cache
        if arguments.beside_cached:
            register_prefix(scheduler.cache, tokens[: arguments.beside_cached])
        start = time.perf_counter()
        [prompt] = bench.submit([tokens], 1)
        during = gaps(bench, streams[0], until=prompt)
        ttft = time.perf_counter() - start
        later = gaps(bench, streams[0], arguments.quiet_steps)
        assert not streams[0].is_finished, "the streams ended before the prompt: raise --stream-tokens"
        yield {"what": "beside", "streams": arguments.streams, "input_len": length, "limit_tokens": most,
               "cached": prompt.num_cached_tokens, "step_ms": step_ms, "step_ratio": ratio, "steps": len(during),
               "ttft_ms": round(ttft * 1e3, 1),
               "quiet_ms": percentiles(quiet), "quiet_after_ms": percentiles(later), "during_ms": percentiles(during),
               "p99_ratio": round(p99(over_quiet(during, p99(quiet), p99(later))), 2)}  # fmt: skip
    for stream in streams:
        bench.engine.finish(stream)
    step_until(bench, lambda: not bench.engine.has_work)


def gaps(bench: EngineBench, stream: Request, num_steps: int = 0, until: Request | None = None) -> list[float]:
    """Seconds between tokens of a stream: of a number of them, or until a prompt has its first token."""
    found: list[float] = []
    last, known = time.perf_counter(), stream.num_output_tokens
    while len(found) < num_steps or (until is not None and until.num_output_tokens == 0):
        decode(bench, [stream], known + 1)
        now, known = time.perf_counter(), stream.num_output_tokens
        found.append(now - last)
        last = now
        if stream.is_finished:
            break
    return found


def p99(seconds: list[float]) -> float:
    return percentile(seconds, 0.99)


def over_quiet(during: list[float], before: float, behind: float) -> list[float]:
    """Each gap over what a quiet one takes at its time, between these two."""
    grown = (behind - before) / len(during)
    return [seconds / (before + grown * index) for index, seconds in enumerate(during)]


def percentiles(seconds: list[float]) -> Record:
    found = {"p50": statistics.median(seconds), "p99": p99(seconds), "max": max(seconds)}
    return {name: round(value * 1e3, 2) for name, value in found.items()}


def floats(text: str) -> list[float]:
    return [float(number) for number in text.split(",") if number]


MEASURES = {"ttft": measure_ttft, "tpot": measure_tpot, "beside": measure_beside}


def main() -> None:
    parser = parser_of(__doc__, "ttft,tpot,beside", tuple(MEASURES))
    add_settings(parser)
    parser.add_argument("--length", type=int, default=131072, help="max_model_len, and about the prompts' length")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--stream-len", type=int, default=1024, help="tokens of the streams' prompts")
    parser.add_argument("--stream-tokens", type=int, default=30000)
    parser.add_argument("--beside-length", type=int, default=0, help="of the prompt beside them; 0: --length")
    parser.add_argument("--beside-cached", type=int, default=0, help="of them, registered but never computed")
    parser.add_argument("--quiet-steps", type=int, default=300)
    parser.add_argument("--limits", type=numbers, default=[0], help="values of max_mixed_prefill_tokens")
    step_ms = "values of max_mixed_step_ms: the first with all limits, the others with the first limit"
    parser.add_argument("--step-ms", type=numbers, default=[0], help=step_ms)
    parser.add_argument("--ratios", type=floats, default=[], help="values of max_mixed_step_ratio, without the others")
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096)
    parser.set_defaults(batches=[1, 4])
    arguments = parser.parse_args()
    arguments.set = [f"max_model_len={arguments.length}", "enable_prefix_caching=true", *arguments.set]
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        bench = EngineBench(arguments, Path(folder))
        gc.collect()
        gc.freeze()  # as the server does: a collection of what loading made would be a gap of 100 ms
        settings = {"shape": arguments.shape, "set": arguments.set}
        emit({**settings, "what": "plan", "plan": str(bench.engine.memory_plan).splitlines()}, arguments.out)
        for name in arguments.measure.split(","):
            for record in MEASURES[name](bench, arguments):
                emit({**settings, **record}, arguments.out)
    gc.unfreeze()


if __name__ == "__main__":
    main()
