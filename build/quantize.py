#!/usr/bin/env python3
"""Makes a quantised checkpoint of an unquantised one, with calibration on text where the algorithm needs it.

    .venv/bin/python build/quantize.py --model MODEL --output OUT --method wint4 --algorithm gptq --text T
    .venv/bin/python build/quantize.py --model MODEL --output OUT --method wint4 --algorithm awq --format awq --text T
    .venv/bin/python build/quantize.py --model MODEL --output OUT --method w8a8_int8 --algorithm smoothquant --text T
    .venv/bin/python build/quantize.py --model MODEL --output OUT --method fp8 --kv-scales --text T
    .venv/bin/python build/quantize.py --model MIXTRAL --output OUT --method a8w8_fp8_wint4 --algorithm gptq --text T

Algorithms may be joined, as in "awq,gptq". Without one, weights are rounded to the best of a grid of scales, which is
what `quantization` in config.pbtxt does at load. Formats: docs/quantization.md.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from quantization.arguments import check_window, positive, share
from quantization.calibration import LayerWalk, load_recorded
from quantization.export import write_checkpoint
from quantization.plan import ALGORITHMS, CHANNEL, FORMATS, GROUPS, INT4_METHODS, METHODS, Plan
from quantization.quantizer import Quantizer
from quantization.text import cut_windows, read_token_ids
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.load import resolve_device, resolve_dtype
from slipstream.nn.models.family import FAMILIES
from slipstream.nn.quant import choose_methods, linear_bytes
from slipstream.nn.quant.choose import MIXED
from slipstream.nn.quant.int4 import DEFAULT_GROUP_SIZE
from slipstream.nn.read_spec import read_spec


def make_plan(args: argparse.Namespace) -> Plan:
    """The plan of the arguments. Raises ValueError for invalid combinations, before anything is read."""
    plan = Plan(
        method=args.method,
        algorithms=tuple(name for name in args.algorithm.split(",") if name),
        format=args.format,
        group_size=group_size(args.group_size, args.method),
        has_zeros=args.zeros,
        smoothing=args.smoothing,
        with_head=args.lm_head,
        with_kv_scales=args.kv_scales,
    )
    plan.check()
    if plan.needs_text and args.text is None:
        raise ValueError(f"text: {args.algorithm or 'KV scales'} needs a calibration text")
    if plan.with_head and read_spec(args.model).tie_word_embeddings:
        raise ValueError("lm-head: it is the embedding table here; set quantize_lm_head when loading instead")
    check_shapes(plan, args.model)
    return plan


def group_size(asked: int | None, method: str) -> int:
    """The group size of a Plan. Raises ValueError if the method has no groups."""
    if asked is None:
        return DEFAULT_GROUP_SIZE
    if method not in (*INT4_METHODS, *MIXED):
        raise ValueError(f"group-size: {method} has no groups; those of {', '.join((*INT4_METHODS, *MIXED))} have")
    if asked not in GROUPS:
        raise ValueError(f"group-size: {asked} is not one of {', '.join(map(str, GROUPS))}")
    return 0 if asked == CHANNEL else asked


def check_shapes(plan: Plan, model: Path) -> None:
    """Raises ConfigError unless the method supports the model's layers, as loading the result would."""
    grouped = plan.of_experts.method in INT4_METHODS
    spec = read_spec(model)
    stored = spec.stored_format or spec.expert_format
    if stored:
        raise ValueError(f"model: {model} is quantised already, in {stored.method}")
    if plan.with_kv_scales and any(attention.latent is not None for attention in spec.attentions):
        reason = "FP8 rows of latent attention have scales of their own, per token"
        raise ValueError(f"kv-scales: {reason}; accepted: without it, served with kv_cache_dtype fp8_e4m3")
    family = FAMILIES.get(spec.architecture)
    if family.prefixes:
        raise ValueError(f"model: {spec.architecture} is stored as a part of another model: not written here")
    if not all(isinstance(name, str) for name in family.names_of(spec).values()):
        raise ValueError(f"model: {spec.architecture} stores layers fused or transformed: not written here")
    size = (plan.group_size or CHANNEL) if grouped else 0
    methods = choose_methods(ModelConfig(quantization=plan.method, quantization_group_size=size), spec)
    for linear in set(spec.layer_linears):
        linear_bytes(methods.experts if linear.num_experts else methods.linears, linear, spec.dtype)


def check_output(output: Path) -> None:
    """Raises ValueError for a folder with files: a checkpoint there would be mixed with the new one, or lost."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"output: {output} is there already and not an empty folder")


def quantize(args: argparse.Namespace) -> int:
    """Returns the bytes of the tensors that were written."""
    plan = make_plan(args)
    check_output(args.output)
    spec = read_spec(args.model)
    device = resolve_device(args.device)
    dtype, windows = resolve_dtype(args.dtype, spec, device), None
    if plan.needs_text:
        check_window(args.window_tokens, spec)
        windows = cut_windows(read_token_ids(args.text, args.model, "train"), args.num_tokens, args.window_tokens)
    decoder = load_recorded(args.model, device, dtype)
    walk = None if windows is None else LayerWalk(decoder, windows, args.batch_windows)
    quantizer = Quantizer(decoder, plan, walk)
    size = write_checkpoint(args.model, args.output, decoder, plan, quantizer.run())
    if quantizer.unseen:
        print(f"experts that the text did not reach, rounded without calibration: {'; '.join(quantizer.unseen)}")
    return size


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the unquantised checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="a folder for the quantised one")
    parser.add_argument("--method", required=True, choices=METHODS)
    parser.add_argument("--algorithm", default="", help=f"{', '.join(ALGORITHMS)}, with commas between; none: rounding")
    parser.add_argument("--format", default="compressed-tensors", choices=FORMATS)
    parser.add_argument("--group-size", type=int, help=f"of 4-bit weights, by default 128; {CHANNEL}: one group a row")
    parser.add_argument("--zeros", action="store_true", help="zero-points, of wint4")
    parser.add_argument("--smoothing", type=share, default=0.5, help="SmoothQuant's strength")
    parser.add_argument("--lm-head", action="store_true", help="quantise lm_head too")
    parser.add_argument("--kv-scales", action="store_true", help="store scales of an FP8 KV cache")
    parser.add_argument("--text", type=Path, help="a UTF-8 file, or a folder of packed shards")
    parser.add_argument("--num-tokens", type=positive, default=32768, help="tokens of text, spread over all of it")
    parser.add_argument("--window-tokens", type=positive, default=512)
    parser.add_argument("--batch-windows", type=positive, default=16)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    return parser.parse_args(arguments)


def main() -> None:
    args, start = parse_arguments(), time.perf_counter()
    try:
        size = quantize(args)
    except (ValueError, ConfigError) as error:
        raise SystemExit(str(error)) from error
    print(f"{args.output}: {size / 1e6:.1f} MB of tensors in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
