"""Load a running server over gRPC at rising concurrency and print a table of what its clients get.

    slipstream bench --url localhost:8001 --concurrency 1,8,32 --input-tokens 512 --output-tokens 128

Each request has a prompt of random token ids of its own, so that no prefix cache helps, and runs to its full length.
TTFT: from sending to the first token. TPOT: from the first token to the last, divided by the tokens between. The client
is Python: beyond some 20 000 tokens/s on one core it measures itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.commands.terminal_stream import connect, generate
from slipstream.core.errors import ConfigError, RequestError

COLUMNS = (
    "concurrency",
    "requests",
    "failed",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p50",
    "tpot_ms_p99",
    "tokens_per_s",
    "requests_per_s",
)
FIRST_ID, LAST_ID = 10, 999  # token ids that every vocabulary has


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="localhost:8001", metavar="HOST:PORT", help="Triton's gRPC (%(default)s)")
    parser.add_argument("--model", default="llm", help="(%(default)s)")
    parser.add_argument("--concurrency", default="1,4,16,64", metavar="N,N,...", help="streams at once (%(default)s)")
    parser.add_argument("--requests", type=int, default=0, help="per row; 0: four per stream, at least 8")
    parser.add_argument("--input-tokens", type=int, default=128, help="of each prompt (%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=64, help="of each answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    parser.add_argument(
        "--num-draft-tokens", type=int, metavar="N", help="drafts per step, for a model with speculation"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")


@dataclass
class Figures:
    """Figures of one row. Times in seconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    num_tokens: int = 0
    errors: list[str] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> int:
    levels = parse_levels(arguments.concurrency)
    for name, least in (("input_tokens", 1), ("output_tokens", 1), ("requests", 0)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')}", getattr(arguments, name), f"accepted: {least} or more")
    if arguments.json and not arguments.json.parent.is_dir():
        raise ConfigError("--json", str(arguments.json), f"no such folder: {arguments.json.parent}")
    rows = asyncio.run(sweep(arguments, levels))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if any(row["failed"] for row in rows) else 0


def parse_levels(text: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1:
        raise ConfigError("--concurrency", text, "accepted: integers of at least 1 with commas, like 1,8,32")
    return levels


async def sweep(arguments: argparse.Namespace, levels: list[int]) -> list[dict[str, Any]]:
    channel, stub = connect(arguments.url)
    dice = random.Random(arguments.seed)
    try:
        await measure(stub, arguments, 1, 1, dice)  # warm up, and refuse early
        print("| " + " | ".join(COLUMNS) + " |\n|" + "--:|" * len(COLUMNS), flush=True)
        rows = []
        for level in levels:
            rows.append(await measure(stub, arguments, level, arguments.requests or max(8, 4 * level), dice))
            print("| " + " | ".join(f"{rows[-1][name]:.4g}" for name in COLUMNS) + " |", flush=True)
            if rows[-1]["first_error"]:
                print(f"the first of {rows[-1]['failed']} that failed: {rows[-1]['first_error']}", flush=True)
        return rows
    finally:
        await channel.close()


async def measure(
    stub: Any, arguments: argparse.Namespace, level: int, count: int, dice: random.Random
) -> dict[str, Any]:
    """Measure one row. Raises RequestError if no request succeeds."""
    figures, left = Figures(), count
    started = time.perf_counter()

    async def client() -> None:
        nonlocal left
        while left:
            left -= 1
            await one_request(stub, arguments, dice, figures)

    await asyncio.gather(*(client() for _ in range(min(level, count))))
    seconds = time.perf_counter() - started
    if not figures.ttft:
        raise RequestError(f"model {arguments.model}", figures.errors[0])
    return {
        "concurrency": level,
        "requests": count,
        "failed": len(figures.errors),
        "first_error": figures.errors[0] if figures.errors else "",
        "ttft_ms_p50": percentile(figures.ttft, 0.5) * 1e3,
        "ttft_ms_p99": percentile(figures.ttft, 0.99) * 1e3,
        "tpot_ms_p50": percentile(figures.tpot, 0.5) * 1e3,
        "tpot_ms_p99": percentile(figures.tpot, 0.99) * 1e3,
        "tokens_per_s": figures.num_tokens / seconds,
        "requests_per_s": (count - len(figures.errors)) / seconds,
    }


async def one_request(stub: Any, arguments: argparse.Namespace, dice: random.Random, figures: Figures) -> None:
    from slipstream.server.generation import Generation

    prompt = [dice.randint(FIRST_ID, LAST_ID) for _ in range(arguments.input_tokens)]
    sampling: dict[str, Any] = {"max_tokens": arguments.output_tokens, "ignore_eos": True}
    sampling["temperature"] = arguments.temperature
    if arguments.num_draft_tokens is not None:
        sampling["num_draft_tokens"] = arguments.num_draft_tokens
    generation = Generation(arguments.model, prompt, sampling, ("text_output", "num_output_tokens"), stream=True)
    started, first, last, num_tokens, num_first = time.perf_counter(), 0.0, 0.0, 0, 0
    try:
        async for response in generate(stub, generation):
            num_new = response.integer("num_output_tokens")
            if not num_new:
                continue
            last = time.perf_counter()
            if not first:
                first, num_first = last, num_new
            num_tokens += num_new
    except RequestError as error:
        figures.errors.append(str(error))
        return
    if num_tokens < arguments.output_tokens:
        figures.errors.append(f"{num_tokens} of {arguments.output_tokens} tokens: more do not fit behind the prompt")
        return
    figures.ttft.append(first - started)
    figures.num_tokens += num_tokens
    if num_tokens > num_first:
        figures.tpot.append((last - first) / (num_tokens - num_first))


def percentile(values: list[float], share: float) -> float:
    """The nearest rank: the smallest value that is no less than this share of them; 0 for an empty list."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0
