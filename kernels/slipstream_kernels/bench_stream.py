"""Time our products of few tokens with large weights on a GPU against torch and FP8.

    python -m slipstream_kernels.bench_stream [--tokens 1,8,16,32,64,128,256] [--model 8b|13b] [--json out.json]

Each time is the mean of the calls in a CUDA graph that rotate over enough weights to miss the L2. "layer" is the chain
of one decoder layer with a norm in place of attention: norm, qkv, norm, o, norm, gate_up, down; it includes the effect
of PDL.  own: skinny_gemm up to 16 tokens, swap_ab_gemm beyond.  other: torch's product and silu_mul, or FP8 rows and
ops.scaled_mm.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from slipstream_kernels import ops
from slipstream_kernels.bench_fp8 import graph_microseconds

Shapes = dict[str, tuple[int, int, bool]]  # name -> out features, in features, gated
MODELS: dict[str, Shapes] = {
    "8b": {
        "qkv": (6144, 4096, False),
        "o": (4096, 4096, False),
        "gate_up": (28672, 4096, True),
        "down": (4096, 14336, False),
        "lm_head": (128256, 4096, False),
    },
    "13b": {
        "qkv": (15360, 5120, False),
        "o": (5120, 5120, False),
        "gate_up": (27392, 5120, True),
        "down": (5120, 13696, False),
        "lm_head": (125696, 5120, False),
    },
}
MAX_STREAMED = 16
LAYER = ("qkv", "o", "gate_up", "down")
NUM_LAYERS = 4  # of a chain: several times the L2
COLD_BYTES = 416 << 20
PEAK_BYTES_PER_S = 4.3e12  # a copy on an H200


class Weight(NamedTuple):
    values: torch.Tensor
    scales: torch.Tensor | None
    counters: torch.Tensor
    gated: bool


def make_weight(shape: tuple[int, int, bool], kind: str) -> Weight:
    out_features, in_features, gated = shape
    weight = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16) / in_features**0.5
    if kind == "bf16":
        return Weight(weight, None, ops.scaled_mm_counters(weight), gated)
    rows = ops.quantize_fp8(weight)
    return Weight(rows.values, rows.scales.view(-1), ops.scaled_mm_counters(weight), gated)


def own(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    if x.shape[0] <= MAX_STREAMED:
        return ops.skinny_gemm(x, weight.values, weight.scales, gated=weight.gated, backend="cuda")
    rows: torch.Tensor | ops.Fp8Rows = x if weight.scales is None else ops.quantize_fp8(x)
    return ops.swap_ab_gemm(rows, weight.values, weight.scales, gated=weight.gated, backend="cuda")


def other(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Without our CUDA kernels; FP8 rows are quantised here, as a kernel of their own or within silu_mul."""
    if weight.scales is None:
        y = F.linear(x, weight.values)
    else:
        y = ops.scaled_mm(ops.quantize_fp8(x), weight.values, weight.scales, counters=weight.counters)
    return ops.silu_mul(y) if weight.gated else y


def layer(product: Callable[[torch.Tensor, Weight], torch.Tensor], x: torch.Tensor, weights: list[Weight]) -> None:
    hidden_size = x.shape[1]
    norm = torch.ones(hidden_size, device="cuda", dtype=torch.bfloat16)
    hidden = residual = x
    for index in range(0, len(weights), len(LAYER)):
        qkv, o, gate_up, down = weights[index : index + len(LAYER)]
        hidden, residual = ops.rms_norm(hidden, norm, 1e-5, residual)
        heads = ops.rms_norm(product(hidden, qkv)[:, :hidden_size], norm, 1e-5)
        hidden, residual = ops.rms_norm(product(heads, o), norm, 1e-5, residual)
        hidden = product(product(hidden, gate_up), down)


def records(shapes: Shapes, tokens: list[int]) -> Iterator[dict[str, object]]:
    """Microseconds of each product and of a layer, and their share of the time that reading the weights takes."""
    for kind, itemsize in (("bf16", 2), ("fp8", 1)):
        for name, (out_features, in_features, gated) in shapes.items():
            size = out_features * in_features * itemsize
            weights = [make_weight((out_features, in_features, gated), kind) for _ in range(max(8, COLD_BYTES // size))]
            for num_tokens in tokens:
                x = torch.randn(num_tokens, in_features, device="cuda", dtype=torch.bfloat16)
                times = [graph_microseconds([partial(call, x, w) for w in weights]) for call in (own, other)]
                yield record(kind, name, num_tokens, size, times)
            del weights
        weights = [make_weight(shapes[name], kind) for _ in range(NUM_LAYERS) for name in LAYER]
        size = sum(weight.values.nbytes for weight in weights) // NUM_LAYERS
        for num_tokens in tokens:
            x = torch.randn(num_tokens, shapes["qkv"][1], device="cuda", dtype=torch.bfloat16)
            times = [graph_microseconds([partial(layer, call, x, weights)] * 2) / NUM_LAYERS for call in (own, other)]
            yield record(kind, "layer", num_tokens, size, times)


def record(kind: str, name: str, num_tokens: int, size: int, times: list[float]) -> dict[str, object]:
    floor = size / PEAK_BYTES_PER_S * 1e6
    return {
        "kind": kind,
        "product": name,
        "tokens": num_tokens,
        "own_us": round(times[0], 2),
        "gb_per_s": round(size / times[0] / 1e3),
        "share": round(floor / times[0], 3),
        "other_us": round(times[1], 2),
        "speed_up": round(times[1] / times[0], 2),
    }


def main() -> None:
    """Print a record per line; see the module's text."""
    parser = argparse.ArgumentParser(description="Time skinny_gemm and swap_ab_gemm")
    parser.add_argument(
        "--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 16, 32, 64, 128, 256]
    )
    parser.add_argument("--model", choices=MODELS, default="8b", help="whose shapes")
    parser.add_argument("--json", type=Path, help="write the records here too")
    arguments = parser.parse_args()
    rows = []
    for row in records(MODELS[arguments.model], arguments.tokens):
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
