#!/usr/bin/env python3
"""Measure the quality of quantised weights and KV caches: perplexity, KL to the full model and top-1 agreement on text.

    .venv/bin/python build/evaluate.py --model MODEL --text notes.txt --weights none,fp8,wint4,wint4:64 --kv auto,int8
    .venv/bin/python build/evaluate.py --model MODEL --text TEXT --weights awq=/checkpoints/model-awq --output results/

Weights are methods, with a group size after ":" if wanted, or checkpoints as NAME=FOLDER; "none" is the model as it is.
The reference is --model unquantised, with a KV cache of its own type.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from quantization.arguments import check_window, positive
from quantization.forward import Schedule, window_logits
from quantization.measures import Measures, compare
from quantization.report import Result, draw, table, write_json
from quantization.text import cut_windows, read_token_ids
from slipstream.core.config import GROUP_SIZES, PREFILL_DTYPES, ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.checkpoint_path import resolve_checkpoint
from slipstream.nn.decoder import Decoder
from slipstream.nn.load import load_model, weight_bytes
from slipstream.nn.read_spec import read_spec
from torch import Tensor
from tqdm import tqdm


def parse_weights(entry: str, args: argparse.Namespace) -> tuple[str, ModelConfig]:
    """(name in the table, config to load) of one entry of --weights."""
    name, has_folder, folder = entry.partition("=")
    method, _, group_size = name.partition(":")
    common = {
        "device": args.device,
        "dtype": args.dtype,
        "quantize_lm_head": args.quantize_lm_head and name != "none",
        "prefill_attention_dtype": args.prefill_attention_dtype,
    }
    if has_folder:
        return name, ModelConfig(model=folder, **common)
    accepted = [str(size) for size in GROUP_SIZES if size]
    if group_size not in ("", *accepted):
        raise ConfigError("quantization_group_size", group_size, f"accepted: {', '.join(accepted)}")
    group = int(group_size or 0)
    return name, ModelConfig(model=str(args.model), quantization=method, quantization_group_size=group, **common)


class Reference:
    """Logits of the unquantised model, kept on its device."""

    def __init__(self, args: argparse.Namespace, windows: Tensor, schedule: Schedule) -> None:
        config = ModelConfig(model=str(args.model), device=args.device, dtype=args.dtype, quantization="none")
        self.decoder = load_model(config)
        bar = tqdm(window_logits(self.decoder, windows, "auto", schedule), "reference", len(windows), unit="window")
        self.logits = list(bar)
        self.measures: Measures = compare(windows, self.logits, self.logits)


def evaluate(args: argparse.Namespace, windows: Tensor, reference: Reference, schedule: Schedule) -> Iterator[Result]:
    """Evaluate every combination of --weights and --kv; unsupported ones are reported and skipped."""
    for entry in args.weights.split(","):
        name = entry.partition("=")[0]
        try:
            name, config = parse_weights(entry, args)
            decoder = load_model(config)
            check_vocabulary(decoder, reference)
        except ConfigError as error:
            print(f"left out: {name}: {error}")
            continue
        size = weight_bytes(config, decoder.spec, decoder.context.dtype)
        for kv in args.kv.split(","):
            start = time.perf_counter()
            try:
                measures = run(decoder, windows, kv, reference, schedule, f"{name}, {kv}")
            except ConfigError as error:
                print(f"left out: {name} with a KV cache of {kv}: {error}")
                continue
            yield Result(name, kv, measures, size, time.perf_counter() - start)


def check_vocabulary(decoder: Decoder, reference: Reference) -> None:
    """Raises ConfigError for a checkpoint of another model."""
    ours, theirs = decoder.spec.vocab_size, reference.decoder.spec.vocab_size
    if ours != theirs:
        raise ConfigError("vocab_size", ours, f"--model has {theirs}: it is not a checkpoint of that model")


def run(decoder: Decoder, windows: Tensor, kv: str, reference: Reference, schedule: Schedule, label: str) -> Measures:
    """One decoder with one type of KV cache, against the reference."""
    logits = tqdm(window_logits(decoder, windows, kv, schedule), label, len(windows), unit="window", leave=False)
    return compare(windows, logits, reference.logits)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the unquantised checkpoint")
    parser.add_argument("--text", type=Path, required=True, help="a UTF-8 file, or a folder of packed shards")
    parser.add_argument("--weights", default="none", help="methods or NAME=FOLDER, with commas between")
    parser.add_argument("--kv", default="auto", help="types as kv_cache_dtype, with commas between")
    parser.add_argument("--num-tokens", type=positive, default=4096, help="tokens of text, spread over all of it")
    parser.add_argument("--window-tokens", type=positive, default=512, help="context of a window")
    parser.add_argument(
        "--step-tokens", type=positive, default=512, help="tokens of a window in one step; 1: as in decoding"
    )
    parser.add_argument("--batch-windows", type=positive, default=16, help="windows in one step")
    parser.add_argument("--quantize-lm-head", action="store_true")
    parser.add_argument(
        "--prefill-attention-dtype", choices=PREFILL_DTYPES, default="auto", help="not of the reference"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path, help="a folder for evaluation.{md,json,png}")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    try:
        check_window(args.window_tokens, read_spec(resolve_checkpoint(str(args.model))))
        if args.output:
            args.output.mkdir(parents=True, exist_ok=True)
        windows = cut_windows(read_token_ids(args.text, args.model), args.num_tokens, args.window_tokens)
        evaluate_all(args, windows)
    except (ValueError, OSError, ConfigError) as error:
        raise SystemExit(str(error)) from error


def evaluate_all(args: argparse.Namespace, windows: Tensor) -> None:
    """A line for each combination as it is done, then the table; exits with an error if none could be served."""
    schedule = Schedule(args.batch_windows, args.step_tokens)
    reference = Reference(args, windows, schedule)
    print(f"{windows.numel()} tokens in {len(windows)} windows, {reference.decoder.context.device}")
    results = []
    for result in evaluate(args, windows, reference, schedule):
        results.append(result)
        print(table([result], reference.measures).splitlines()[-1], f"{result.seconds:.1f} s", flush=True)
    if not results:
        raise ValueError("none of --weights could be served with any of --kv")
    print(table(results, reference.measures))
    if args.output:
        save(args, results, reference.measures, windows.numel())


def save(args: argparse.Namespace, results: list[Result], reference: Measures, num_tokens: int) -> None:
    """Table, JSON and plot; without matplotlib, no plot."""
    arguments = {name: str(value) for name, value in vars(args).items()}
    about = {"num_tokens": num_tokens, "reference": asdict(reference), "arguments": arguments}
    write_json(results, about, args.output / "evaluation.json")
    (args.output / "evaluation.md").write_text(table(results, reference) + "\n")
    try:
        draw(results, reference, args.output / "evaluation.png")
    except ImportError as error:
        print(f"no plot: {error}; pip install slipstream[tools]")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
