#!/usr/bin/env python3
"""Speed of speculation against plain decoding on the same engine build: tokens per step, acceptance, speed-up.

    python tests/bench/bench_speculation.py --model models/slipstream-demo-code --methods ngram --texts held_out.jsonl
    python tests/bench/bench_speculation.py --model MODEL --methods medusa:HEADS --texts texts.jsonl --task answer
    python tests/bench/bench_speculation.py --shape llama3-8b --methods medusa mtp --concurrency 1 2 4

With a checkpoint, acceptance is real: prompts are the beginnings of held-out texts, texts to repeat with small edits
(--task edit), or the questions of conversations by build/generate_texts.py (--task answer; those whose answer had more
than output-len tokens, as the end of an answer is ignored). With --shape, weights are random and acceptance is
simulated: drafts cost what they cost, and of each verification as many are taken as the method's rates (profiles.py)
say. One JSON object per line, then a table. by_rows says what decode steps took: [rows a request, how many, median ms,
longest ms, tokens a request]; costs, of an engine with CUDA graphs, is what its planner was told at start, in ms
(verified: by rows/requests).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import simulated_acceptance
import torch
from profiles import PROFILES
from shapes import SHAPES
from slipstream.core.config_parse import config_from_values
from slipstream.core.draft_methods import DRAFT_METHODS
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.speculation import MeasuredStep
from slipstream.engine.engine import Engine
from slipstream.worker.spec_decode import ngram
from slipstream.worker.spec_decode.interface import PROPOSERS

FIRST_STEPS = 4  # that are not timed
DRAFT_SHAPES = {"llama3-8b": "llama3-1b", "baichuan2-13b": "llama3-1b"}  # of other shapes: the shape itself
TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "slipstream-demo-code"


class TalkativeNgram(ngram.NgramProposer):
    """Always has drafts, though random weights say nothing twice; whether they are right is simulated too."""

    def _continue(self, request: Request, num_drafts: int) -> list[int]:
        return (super()._continue(request, num_drafts) + request.token_ids[-num_drafts:])[:num_drafts]


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> dict[str, Any]:
    """Decode all prompts at once; timed while all of them run: from a few steps after the last is prefilled (a draft
    model computes prompts before its first draft) to the end of the first."""
    planner = engine.scheduler.planner
    steps: list[MeasuredStep] = []
    planner.measure = lambda step: (steps.append(step), type(planner).measure(planner, step))[1]  # type: ignore[method-assign]
    requests = [Request(list(prompt), wanted) for prompt, wanted in zip(prompts, params)]
    for request in requests:
        engine.submit(request)
    while engine.has_work and any(request.num_output_tokens == 0 for request in requests):
        engine.step()
    prefilled = time.perf_counter()
    for _ in range(FIRST_STEPS):
        engine.step()
    first = sum(request.num_output_tokens for request in requests)
    start, num_steps, num_rows = time.perf_counter(), 0, 0
    while engine.has_work and not any(request.is_finished for request in requests):
        outputs = engine.step()
        num_steps += bool(outputs)
        num_rows += sum(bool(output.new_token_ids) for output in outputs)
    seconds = time.perf_counter() - start
    made = sum(request.num_output_tokens for request in requests) - first
    while engine.has_work:
        engine.step()
    assert engine.error is None, engine.error
    drafted = sum(request.num_drafted_tokens for request in requests)
    accepted = sum(request.num_accepted_tokens for request in requests)
    return {
        "tok_s": made / seconds,
        "tokens_per_step": made / max(1, num_rows),
        "acceptance": accepted / max(1, drafted),
        "steps": num_steps,
        "first_ms": 1e3 * (start - prefilled),
        "by_rows": by_rows(steps),
    }


def by_rows(steps: list[MeasuredStep]) -> list[list[float]]:
    """What steps took, by their rows a request, rounded; see the head of this file."""
    alike: dict[int, list[MeasuredStep]] = defaultdict(list)
    for step in steps:
        alike[round(step.num_rows / step.num_running)].append(step)
    return [
        [
            rows,
            len(some),
            round(1e3 * median(step.seconds for step in some), 3),
            round(1e3 * max(step.seconds for step in some), 3),
            round(fmean(step.tokens_per_request for step in some), 3),
        ]
        for rows, some in sorted(alike.items())
    ]


def print_costs(method: str, engine: Engine) -> None:
    costs = engine.scheduler.planner._costs
    if costs is not None:
        in_ms = lambda pairs: {size: round(1e3 * seconds, 3) for size, seconds in pairs}  # noqa: E731
        drafting = {name: in_ms(pairs) for name, pairs in costs.drafting.items()}
        verified = in_ms((f"{rows}/{count}", seconds) for rows, count, _, seconds in costs.verified)
        told = {"plain": in_ms(costs.plain), "verified": verified, "drafting": drafting}
        print(json.dumps({"method": method, "costs": told}), flush=True)


def read_prompts(arguments: argparse.Namespace, engine: Engine, count: int) -> tuple[list[list[int]], list[int]]:
    """Token ids, and how many tokens to make of each."""
    if arguments.shape:
        dice = random.Random(0)
        top = min(engine.spec.vocab_size, 30000)
        prompts = [[dice.randrange(10, top) for _ in range(arguments.input_len)] for _ in range(count)]
        return prompts, [arguments.output_len] * count
    with arguments.texts.open() as lines:
        records = [json.loads(line) for line in lines]
    if arguments.task == "answer":
        return questions(records, arguments.output_len, count), [arguments.output_len] * count
    texts = [record["text"] for record in records]
    encoded = [engine.tokenizer.encode(text) for text in texts if len(text) > 4 * arguments.input_len]
    chosen = [encoded[(7 * place) % len(encoded)] for place in range(count)]
    if arguments.task == "edit":
        return [edit_prompt(ids[: arguments.input_len], place) for place, ids in enumerate(chosen)], [
            min(arguments.output_len, arguments.input_len - 32)
        ] * count
    return [ids[: arguments.input_len] for ids in chosen], [arguments.output_len] * count


def questions(records: list[dict[str, Any]], output_len: int, count: int) -> list[list[int]]:
    """Prompts of conversations with long answers. Raises SystemExit if there are none."""
    asked = [record["token_ids"][: record["num_prompt_tokens"]] for record in records
             if len(record["token_ids"]) - record["num_prompt_tokens"] > output_len]  # fmt: skip
    if not asked:
        raise SystemExit(f"no answer of the texts has more than {output_len} tokens")
    return [asked[place % len(asked)] for place in range(count)]


def edit_prompt(token_ids: list[int], seed: int) -> list[int]:
    """A text, and its beginning again with one token in fifty another: what an editor repeats with small edits."""
    dice = random.Random(seed)
    again = [dice.choice(token_ids) if dice.random() < 0.02 else token for token in token_ids[:32]]
    return [*token_ids, *again]


def make_engine(arguments: argparse.Namespace, method: str) -> Engine:
    values: dict[str, object] = {
        "model": str(arguments.model),
        "max_num_seqs": max(arguments.concurrency),
        "enable_prefix_caching": False,
        **dict(option.split("=", 1) for option in arguments.options),
    }
    if arguments.shape:
        values |= {"load_format": "dummy", "tokenizer": str(TOKENIZER)}
        values.setdefault("max_model_len", arguments.input_len + arguments.output_len + 64)
    if method != "plain":
        name, *paths = method.split(":")
        values["speculative_method"] = name
        if paths and paths[0]:
            values[DRAFT_METHODS.get(name).checkpoint] = paths[0]
        elif arguments.shape and name == "draft_model":
            values["draft_model"] = str(arguments.model.parent / "draft")
        if len(paths) > 1:
            values["num_draft_tokens"] = paths[1]
        values["speculation_throttle"] = arguments.throttle
    engine = Engine(config_from_values(values))
    gc.collect()
    gc.freeze()  # as the server does: a collection of what loading made would take 100 ms of a run
    return engine


def measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    if arguments.shape:
        simulate()
    records = []
    methods = ["plain", *arguments.methods, "plain"]  # twice: the first engine of a process is the slowest
    for method in methods:
        simulated_acceptance.SimulatedVerification.rates = PROFILES.get(method.split(":")[0], [])
        engine = make_engine(arguments, method)
        print_costs(method, engine)
        for temperature in arguments.temperatures:
            for count in arguments.concurrency:
                prompts, lengths = read_prompts(arguments, engine, count)
                params = [
                    SamplingParams(max_tokens=length, temperature=temperature, seed=place, ignore_eos=True)
                    for place, length in enumerate(lengths)
                ]
                run(engine, prompts, [replace(wanted, max_tokens=arguments.warm_len) for wanted in params])
                best = max((run(engine, prompts, params) for _ in range(arguments.repeats)), key=lambda r: r["tok_s"])
                record = {"method": method.split(":")[0], "temperature": temperature, "concurrency": count}
                if not best["steps"]:
                    print(json.dumps({**record, "error": "one ended before all ran: longer --output-len"}))
                    continue
                rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in best.items()}
                records.append({**record, **rounded})
                print(json.dumps(records[-1]), flush=True)
        engine.close()
        gc.unfreeze()
        del engine
        _empty_device()
    return records


def simulate() -> None:
    """From now on in this process."""
    simulated_acceptance.simulate()
    PROPOSERS._entries["ngram"] = TalkativeNgram


def write_shape(shape: str, folder: Path) -> None:
    """A checkpoint without weights, for load_format dummy."""
    shutil.copytree(TOKENIZER, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape].config()))


def _empty_device() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(records: list[dict[str, Any]]) -> str:
    plain: dict[tuple[float, int], float] = defaultdict(float)  # the faster of the two
    for r in records:
        if r["method"] == "plain":
            load = r["temperature"], r["concurrency"]
            plain[load] = max(plain[load], r["tok_s"])
    lines = ["method       T    conc  tok/s     x plain  tokens/step  accepted"]
    for r in records:
        ratio = r["tok_s"] / plain[r["temperature"], r["concurrency"]]
        lines.append(
            f"{r['method']:<12} {r['temperature']:<4} {r['concurrency']:>4}  {r['tok_s']:>8.1f}  {ratio:>6.2f}"
            f"  {r['tokens_per_step']:>10.2f}  {r['acceptance']:>8.3f}"
        )
    return "\n".join(lines)


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", choices=tuple(SHAPES), help="random weights of this shape, acceptance simulated")
    parser.add_argument("--methods", nargs="+", default=["ngram"], help="method[:folder[:num_draft_tokens]]")
    parser.add_argument("--texts", type=Path, help='JSON lines with a "text" each')
    parser.add_argument("--task", choices=("continue", "edit", "answer"), default="continue")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--warm-len", type=int, default=64, help="tokens made before, in which the planner learns")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--throttle", choices=("auto", "off"), default="off")
    parser.add_argument("--options", nargs="*", default=[], help="further parameters, name=value")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.shape:
            arguments.model = Path(folder) / "model"
            write_shape(arguments.shape, arguments.model)
            write_shape(DRAFT_SHAPES.get(arguments.shape, arguments.shape), arguments.model.parent / "draft")
        records = measure(arguments)
    print(table(records))
    if arguments.out:
        arguments.out.write_text("\n".join(map(json.dumps, records)) + "\n")


if __name__ == "__main__":
    main()
