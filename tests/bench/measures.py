"""The loops that time an engine, whichever it is: decode TPOT by batch, TTFT by prompt length, offline throughput.

TPOT is of the steps that all requests of a batch decode in (step_window.py), through a server the difference of two
runs that differ only in output length; TTFT is one prompt with one token of output.
`batch` is both of batches that come at once: tokens/s from the first prompt to the last token, and while decoding.
`limit` is the share of the physical limit: the bytes that a step must read at 4.3 TB/s (--memory-tb-s), or its products
at 790 (bf16) or 1600 (fp8) TFLOP/s, whichever is longer, at the context before the timed steps. One JSON object per
line. Standard library only, so that it runs beside any engine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from shapes import BYTES_PER_S, SHAPES, Shape

Record = dict[str, Any]
Prompt = list[int]
WARM_UP = ((4, 256, 16), (1, 2048, 4))  # prompts, their length, output length
BLOCK_SIZE = 64  # the engine's default on a GPU; others have smaller ones
SPREAD = 1.1  # of repeats, the largest over the least
RATIO_KEYS = ("what", "batch", "context", "input_len", "num_prompts", "output_len", "concurrency", "adapters")


class Bench(Protocol):
    """An engine under test. pool_tokens: how many tokens its KV cache holds. num_adapters: which the requests to come
    have in turns."""

    shape: Shape
    max_model_len: int
    pool_tokens: int
    num_adapters: int

    def timed(self, prompts: list[Prompt], num_output: int) -> float:
        """Seconds until every prompt has exactly num_output greedy tokens."""
        ...

    def step_seconds(self, prompts: list[Prompt], short: int, long: int) -> float:
        """Seconds of a step that all prompts are decoded in, each from `short` tokens on, with `long` in all."""
        ...


class StreamBench(Bench, Protocol):
    """One that also bounds how many requests are under way."""

    def timed(self, prompts: list[Prompt], num_output: int, concurrency: int | None = None) -> float:
        """With a concurrency, a prompt is sent when another has ended, and at first so many."""
        ...


Measure = Callable[[Bench, argparse.Namespace], Iterator[Record]]


def draw_prompts(shape: Shape, count: int, length: int, seed: int = 0) -> list[Prompt]:
    """Fewer are the first of more, and shorter ones begin longer ones, so that a prefix cache knows them."""
    top = min(shape.vocab, 30000)
    dice = [random.Random(f"{seed} {index}") for index in range(count)]
    return [[die.randrange(10, top) for _ in range(length)] for die in dice]


def warm_up(bench: Bench) -> None:
    for count, length, num_output in WARM_UP:
        bench.timed(draw_prompts(bench.shape, count, min(length, bench.max_model_len - num_output)), num_output)


def in_blocks(num_tokens: int) -> int:
    """What a sequence takes of a pool whose blocks have up to BLOCK_SIZE tokens."""
    return -(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE


def measure_prefill(bench: Bench, arguments: argparse.Namespace) -> Iterator[Record]:
    for length in arguments.prefill_lens:
        if length < bench.max_model_len:
            # of seeds of their own: no prompt begins as one that a prefix cache knows
            prompts = [draw_prompts(bench.shape, 1, length, 100 * length + n) for n in range(1 + arguments.repeats)]
            _, *times = [bench.timed(prompt, 1) for prompt in prompts]
            median_ms = statistics.median(times) * 1e3
            yield {"what": "prefill", "batch": 1, "input_len": length, "ttft_ms": round(median_ms, 3)}


def measure_decode(bench: Bench, arguments: argparse.Namespace) -> Iterator[Record]:
    for context in arguments.contexts:
        prompts: list[Prompt] = []  # the most of this context so far: those that a prefix cache knows
        for batch in arguments.batches:
            cell = {"what": "decode", "batch": batch, "context": context}
            if reason := _why_not(bench, arguments, batch, context):
                yield {**cell, "skipped": reason}
                continue
            is_new = batch > len(prompts)
            if is_new:
                prompts = draw_prompts(bench.shape, batch, context)
            # prompts that are computed want a second run, which begins with cached ones as those that are timed do
            for _ in range(1 + (arguments.prefix_caching and is_new)):
                bench.timed(prompts[:batch], 8)
            yield {**cell, **_decode_figures(bench, arguments, prompts[:batch], context)}


def _why_not(bench: Bench, arguments: argparse.Namespace, batch: int, context: int) -> str:
    """Why a decode is left out; "" if it is measured."""
    if arguments.most_tokens and batch * context > arguments.most_tokens:
        return f"more than --most-tokens {arguments.most_tokens}"
    if context + arguments.decode_long > bench.max_model_len:
        return f"longer than the {bench.max_model_len} tokens of a request"
    does_fit = batch * in_blocks(context + arguments.decode_long) <= bench.pool_tokens
    return "" if does_fit else "the KV cache does not hold it"


def _decode_figures(bench: Bench, arguments: argparse.Namespace, prompts: list[Prompt], context: int) -> Record:
    short, long, batch = arguments.decode_short, arguments.decode_long, len(prompts)
    steps = _until_they_agree(partial(bench.step_seconds, prompts, short, long), arguments.decode_repeats)
    seconds = statistics.median(steps)
    bytes_per_s = arguments.memory_tb_s * 1e12
    limit = bench.shape.limit_s(batch, context, arguments.weight_bytes, arguments.kv_bytes, bytes_per_s)
    return {
        "tpot_ms": round(seconds * 1e3, 4),
        "tpot_ms_all": [round(step * 1e3, 4) for step in steps],
        "out_tok_s": round(batch / seconds, 1),
        "limit": round(limit / seconds, 3),
    }


def seconds_by_difference(bench: Bench, prompts: list[Prompt], short: int, long: int) -> float:
    """step_seconds of an engine whose steps are not seen: of two runs."""
    return (bench.timed(prompts, long) - bench.timed(prompts, short)) / (long - short)


def _until_they_agree(timed: Callable[[], float], repeats: int) -> list[float]:
    """So many times, and up to twice as many and one more while the least and the largest are far apart: an engine may
    compile something in one of them."""
    times = [timed() for _ in range(repeats)]
    while len(times) < 2 * repeats + 1 and max(times) > SPREAD * min(times):
        times.append(timed())
    return times


def measure_batch(bench: Bench, arguments: argparse.Namespace) -> Iterator[Record]:
    """Whole batches, prompts and all. Needs more tokens of output than decode_short."""
    num_input, num_output, short = arguments.input_len, arguments.output_len, arguments.decode_short
    for batch in arguments.batches:
        sizes = {"what": "batch", "batch": batch, "input_len": num_input, "output_len": num_output}
        if batch * in_blocks(num_input + num_output) > bench.pool_tokens:
            yield {**sizes, "skipped": "the KV cache does not hold it"}
            continue
        prompts = draw_prompts(bench.shape, batch, num_input)
        bench.timed(prompts, short)  # prepares what steps of these shapes want: what it took would count as no decoding
        first_s, whole_s = bench.timed(prompts, short), bench.timed(prompts, num_output)
        decoded = batch * (num_output - short)
        yield {
            **sizes,
            "elapsed_s": round(whole_s, 3),
            "out_tok_s": round(batch * num_output / whole_s, 1),
            "decode_tok_s": round(decoded / (whole_s - first_s), 1),
        }


def measure_throughput(bench: Bench, arguments: argparse.Namespace) -> Iterator[Record]:
    count, num_input, num_output = arguments.num_prompts, arguments.input_len, arguments.output_len
    prompts = draw_prompts(bench.shape, count, num_input)
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


def measure_streams(bench: StreamBench, arguments: argparse.Namespace) -> Iterator[Record]:
    """The throughput of clients of whom so many have a request under way, one after the other."""
    num_input, num_output = arguments.input_len, arguments.output_len
    for concurrency in arguments.concurrency:
        count = max(arguments.num_prompts, concurrency)
        prompts = draw_prompts(bench.shape, count, num_input)
        bench.timed(prompts[:16], 8)
        elapsed = bench.timed(prompts, num_output, concurrency)
        yield {
            "what": "streams",
            "concurrency": concurrency,
            "num_prompts": count,
            "input_len": num_input,
            "output_len": num_output,
            "elapsed_s": round(elapsed, 3),
            "out_tok_s": round(count * num_output / elapsed, 1),
        }


STREAMS: Measure = measure_streams  # type: ignore[assignment]  # needs a StreamBench
MEASURES: dict[str, Measure] = {
    "prefill": measure_prefill,
    "decode": measure_decode,
    "throughput": measure_throughput,
    "batch": measure_batch,
}


def read_records(path: Path) -> list[Record]:
    """Without a last line that its program was killed in."""
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]


def figure_of(record: Record) -> str | None:
    """The time that a record is compared by."""
    return next((name for name in ("tpot_ms", "ttft_ms", "elapsed_s") if name in record), None)


def time_ratio(rival: Record, ours: Record) -> float:
    """Above 1: we are faster. Both must be lines of the same measurement."""
    figure = figure_of(ours)
    assert figure is not None
    return float(rival[figure]) / float(ours[figure])


def are_alike(one: Record, other: Record, keys: Iterable[str]) -> bool:
    """Whether these are the same; what is empty counts as not stated."""
    return all((one.get(key) or None) == (other.get(key) or None) for key in keys)


def add_ratio(record: Record, rivals: Iterable[list[Record]]) -> None:
    """ratio: how many times faster than the fastest rival's last line of the same measurement."""
    figure = figure_of(record)
    ratios = []
    for rival in rivals:
        alike = [other for other in rival if figure in other and are_alike(other, record, RATIO_KEYS)]
        ratios += [time_ratio(other, record) for other in alike[-1:]]
    if ratios:
        record["ratio"] = round(min(ratios), 3)


def emit(record: Record, out: Path | None) -> None:
    line = json.dumps(record)
    print(line, flush=True)
    if out:
        with out.open("a") as file:
            file.write(line + "\n")


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def setting(text: str) -> str:
    """The type of --set. Raises ArgumentTypeError."""
    name, equals, _ = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}, accepted: PARAMETER=VALUE with a name of docs/configuration.md")
    return text


def add_settings(parser: argparse.ArgumentParser, purpose: str = "as in config.pbtxt") -> None:
    """The option --set, whose `set` is a list of PARAMETER=VALUE."""
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="PARAMETER=VALUE", help=purpose)


def parser_of(
    description: str | None, measures: str = "decode,prefill,throughput", accepted: Iterable[str] = tuple(MEASURES)
) -> argparse.ArgumentParser:
    """Options that all engines share. measures: the default of --measure; accepted: what it may name."""

    def known(text: str) -> str:
        if unknown := sorted(set(text.split(",")) - set(accepted)):
            raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))}, accepted: {', '.join(accepted)}")
        return text

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    parser.add_argument("--layers", type=int, default=0, help="the first so many of the shape's; 0: all")
    parser.add_argument("--measure", type=known, default=measures, help=f"with commas: {', '.join(accepted)}")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--prefill-lens", type=numbers, default=[1024, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--contexts", type=numbers, default=[1024], help="tokens before the decodes that are timed")
    most_tokens = "of a batch's contexts in all: decodes of more, whose prompts take long, are left out"
    parser.add_argument("--most-tokens", type=int, default=0, help=most_tokens)
    parser.add_argument(
        "--prefix-caching", action="store_true", help="prompts of decodes are computed once; not for batch"
    )
    parser.add_argument("--decode-short", type=int, default=32)
    parser.add_argument("--decode-long", type=int, default=160)
    parser.add_argument("--decode-repeats", type=int, default=2)
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=1024)
    parser.add_argument("--concurrency", type=numbers, default=[64, 128, 256], help="of the measure `streams`")
    parser.add_argument("--max-model-len", type=int, default=33792)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--weight-bytes", type=float, default=2.0, help="per weight, for the limit")
    parser.add_argument("--kv-bytes", type=float, default=2.0, help="per cached number, for the limit")
    rate = "that the GPU copies, for the limit: 4.3 an H200, 3.0 an H100"
    parser.add_argument("--memory-tb-s", type=float, default=BYTES_PER_S / 1e12, help=rate)
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="1: random tokens, which reach experts that equal ones would not"
    )
    parser.add_argument("--adapters", type=numbers, default=[], help="LoRA adapters that requests have in turns")
    parser.add_argument("--adapter-rank", type=int, default=16)
    rival = "JSON lines of another engine, for ratios (above 1: we are faster); of several the fastest counts"
    parser.add_argument("--rival", type=Path, action="append", default=[], help=rival)
    below = "profiles decodes whose ratio is below, six at most (bench_engine alone)"
    parser.add_argument("--profile-below", type=float, default=0.0, metavar="RATIO", help=below)
    parser.add_argument("--out", type=Path, help="JSON lines are appended to this file")
    return parser


def run(
    bench: Bench,
    arguments: argparse.Namespace,
    settings: Record,
    more: dict[str, Measure] | None = None,
    after: Callable[[list[Record]], Iterable[Record]] = lambda records: (),
) -> None:
    """Warm up, then every measurement that was asked for. after: what is measured once a measurement's lines are."""
    rivals = [read_records(path) for path in arguments.rival]
    for count in arguments.adapters or [0]:
        bench.num_adapters = count
        with_adapters = {"adapters": count} if arguments.adapters else {}
        warm_up(bench)
        for name in arguments.measure.split(","):
            records = []
            for record in {**MEASURES, **(more or {})}[name](bench, arguments):
                record |= with_adapters
                add_ratio(record, rivals)
                emit({**settings, **record}, arguments.out)
                records.append(record)
            for record in after(records):
                emit({**settings, **record, **with_adapters}, arguments.out)
