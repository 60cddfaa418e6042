#!/usr/bin/env python3
"""Measure the mean of a model's keys on text, for `prefill_attention_dtype: fp8`, and what it saves in rounding.

    .venv/bin/python build/key_means.py --model MODEL --text notes.txt --window-tokens 8192 --num-tokens 65536

Writes key_means.safetensors into the checkpoint's folder, or to --output. Keys are taken after the rotation, so a mean
holds for positions like those of the windows: take windows as long as the prompts that will be served.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from quantization.arguments import check_window, positive
from quantization.forward import empty_caches, window_step
from quantization.text import cut_windows, read_token_ids
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.checkpoint_path import resolve_checkpoint
from slipstream.nn.decoder import Decoder
from slipstream.nn.key_means import FILE, FP8, check_fp8_prefill, write_key_means
from slipstream.nn.load import load_model, resolve_device
from slipstream.nn.read_spec import read_spec
from torch import Tensor
from tqdm import tqdm

STEP_TOKENS = 512


@torch.inference_mode()
def measure(decoder: Decoder, windows: Tensor) -> tuple[list[Tensor], list[tuple[float, float]]]:
    """windows: [num_windows, window_tokens]. Returns the means, [num_kv_heads, head_dim] of each layer, and of each
    layer the rms error of keys rounded to e4m3 over their spread: as they are, and less the mean."""
    totals: list[Tensor] = [torch.zeros(())] * len(decoder.layers)
    for keys in _keys(decoder, windows, "means"):
        totals = [total + layer.double().sum(0) for total, layer in zip(totals, keys)]
    means = [(total / windows.numel()).float() for total in totals]
    sums = torch.zeros(len(means), 3, dtype=torch.float64)
    for keys in _keys(decoder, windows[:1], "errors"):
        for layer, (key, mean) in enumerate(zip(keys, means)):
            parts = (_rounding(key), _rounding(key - mean), key - mean)
            sums[layer] += torch.stack([part.double().square().sum() for part in parts]).cpu()
    return means, [((plain / spread) ** 0.5, (less / spread) ** 0.5) for plain, less, spread in sums.tolist()]


def _keys(decoder: Decoder, windows: Tensor, label: str) -> list[Tensor]:
    """The keys of all layers, of each window in turn: [window_tokens, num_kv_heads, head_dim] fp32."""
    for window in tqdm(windows, label, unit="window"):
        caches = empty_caches(decoder, -(-len(window) // 64), "auto")
        tokens = window[None].to(decoder.context.device)
        for start in range(0, len(window), STEP_TOKENS):
            decoder.forward(window_step(tokens, start, min(start + STEP_TOKENS, len(window))), caches)
        yield [cache.key.transpose(1, 2).flatten(0, 1)[: len(window)].float() for cache in caches]


def _rounding(keys: Tensor) -> Tensor:
    """What rounding to e4m3 changes."""
    return keys.to(torch.float8_e4m3fn).float() - keys


def run(args: argparse.Namespace) -> None:
    config = ModelConfig(model=str(args.model), device=args.device, dtype=args.dtype)
    folder = resolve_checkpoint(config.model)
    spec, device = read_spec(folder), resolve_device(config.device)
    asked = ModelConfig(model=config.model, prefill_attention_dtype=FP8)
    check_fp8_prefill(asked, spec, device, None)
    check_window(args.window_tokens, spec)
    windows = cut_windows(read_token_ids(args.text, args.model), args.num_tokens, args.window_tokens)
    means, errors = measure(load_model(config, spec, device), windows)
    path = args.output or folder / FILE
    about = {"text": args.text.name, "num_tokens": windows.numel(), "window_tokens": args.window_tokens}
    write_key_means(path, [mean.cpu() for mean in means], about)
    print("| layer | error of rounded keys | less the mean |\n|--:|--:|--:|")
    for layer, (plain, less) in enumerate(errors):
        print(f"| {layer} | {plain:.4f} | {less:.4f} |")
    plain, less = (sum(column) / len(errors) for column in zip(*errors))
    print(f"mean of all layers: {plain:.4f} as they are, {less:.4f} less the mean; written to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the checkpoint, of any format")
    parser.add_argument("--text", type=Path, required=True, help="a UTF-8 file, or a folder of packed shards")
    parser.add_argument("--num-tokens", type=positive, default=16384, help="of text, spread over all of it")
    parser.add_argument("--window-tokens", type=positive, default=2048, help="positions that the means are for")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path, help=f"instead of {FILE} in the checkpoint's folder")
    try:
        run(parser.parse_args())
    except (ValueError, OSError, ConfigError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
