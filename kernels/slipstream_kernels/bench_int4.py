"""Time products with 4-bit weights on a GPU beside bf16 and FP8 in one run: Llama-3-8B and 70B, Baichuan2-13B.

    python -m slipstream_kernels.bench_int4 [--models llama-3-8b,...] [--tokens 1,8,...] [--canonical] [--json out.json]

--canonical: instead, weights of groups of 32, which keep their canonical order, by each of their kernels beside bf16.
Each time is of a CUDA graph of calls that rotate over enough weights to miss the L2, divided by their number: what a
decode step pays.  GB/s: of weights and their scales.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from slipstream_kernels import ops
from slipstream_kernels.bench_fp8 import graph_microseconds
from slipstream_kernels.gemm.kernels import KERNELS
from slipstream_kernels.integer import Int4Weight

MODELS = {  # out, in features of qkv, o, gate_up, down
    "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "baichuan2-13b": ((15360, 5120), (5120, 5120), (27392, 5120), (5120, 13696)),
    "llama-3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
}
NUM_TOKENS = (1, 8, 16, 32, 48, 64, 128, 256, 1024, 4096)
COLD_BYTES = 240 << 20  # weights that one graph goes through: four times the L2
GROUP, CANONICAL_GROUP = 128, 32
# Of 10,944 input features no block of 128 is the last.
CANONICAL_MODELS = {**MODELS, "deepseek-v2-lite": ((21888, 2048), (2048, 10944))}
CANONICAL_KERNELS = ("int4_mm", "int4_canonical_dequantise+library")
Calls = list[Callable[[], object]]


def int4_weights(out_features: int, in_features: int, *, for_fp8_rows: bool) -> list[Int4Weight]:
    """Repacked weights of random codes, together larger than the cache."""
    weights = canonical_weights(out_features, in_features, GROUP)
    return [ops.repack_int4(weight, for_fp8_rows=for_fp8_rows) for weight in weights]


def held_int4_weights(out_features: int, in_features: int, fp8_rows: bool) -> list[ops.LinearWeight]:
    """The same as layers hold them."""
    weights = int4_weights(out_features, in_features, for_fp8_rows=fp8_rows)
    return [ops.int4_linear_weight(weight, fp8_rows=fp8_rows) for weight in weights]


def canonical_weights(out_features: int, in_features: int, group_size: int) -> Iterator[Int4Weight]:
    """Weights of random codes with zero-points, together larger than the cache."""
    for _ in range(max(2, COLD_BYTES // (out_features * in_features // 2))):
        packed = torch.randint(256, (out_features, in_features // 2), dtype=torch.uint8, device="cuda")
        scales = (0.5 + torch.rand(out_features, in_features // group_size, device="cuda")) * in_features**-0.5 / 4
        zeros = torch.randint(17, scales.shape, dtype=torch.uint8, device="cuda")
        yield Int4Weight(packed, scales, zeros, group_size, out_features, in_features)


def dense_weights(out_features: int, in_features: int) -> list[torch.Tensor]:
    """bf16, together larger than the cache."""
    return [
        torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16)
        for _ in range(max(2, COLD_BYTES // (2 * out_features * in_features)))
    ]


def fp8_weights(out_features: int, in_features: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(values, scales, counters) of FP8 weights scaled per output feature."""
    weights = []
    for _ in range(max(2, COLD_BYTES // (out_features * in_features))):
        rows = ops.quantize_fp8(torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16))
        weights.append((rows.values, rows.scales.view(-1), ops.scaled_mm_counters(rows.values)))
    return weights


def records(models: list[str], tokens: list[int]) -> Iterator[dict[str, object]]:
    """One per model, shape and number of tokens: microseconds of each format."""
    for model in models:
        for out_features, in_features in MODELS[model]:
            dense = dense_weights(out_features, in_features)
            fp8 = fp8_weights(out_features, in_features)
            w4a16, w4a8 = (held_int4_weights(out_features, in_features, is_fp8) for is_fp8 in (False, True))
            for num_tokens in tokens:
                x = torch.randn(num_tokens, in_features, device="cuda", dtype=torch.bfloat16)
                rows = ops.quantize_fp8(x, ops.Fp8Scheme(sum_columns=GROUP))
                calls: dict[str, Calls] = {
                    "bf16": [partial(F.linear, x, weight) for weight in dense],
                    "fp8": [partial(ops.scaled_mm, rows, *weight[:2], counters=weight[2]) for weight in fp8],
                    "w4a16": [partial(ops.linear, x, weight) for weight in w4a16],
                    "w4a8": [partial(ops.linear, rows, weight) for weight in w4a8],
                }
                times = {name: graph_microseconds(many, repeats=3) for name, many in calls.items()}
                yield {"model": model, "out": out_features, "in": in_features, "tokens": num_tokens, **times}


def canonical_records(models: list[str], tokens: list[int]) -> Iterator[dict[str, object]]:
    """One per model, shape and number of tokens: microseconds of bf16, and of each kernel of canonical weights."""
    for model in models:
        for out_features, in_features in CANONICAL_MODELS[model]:
            dense = dense_weights(out_features, in_features)
            weights = canonical_weights(out_features, in_features, CANONICAL_GROUP)
            held = [ops.int4_linear_weight(weight) for weight in weights]
            for num_tokens in tokens:
                x = torch.randn(num_tokens, in_features, device="cuda", dtype=torch.bfloat16)
                calls: dict[str, Calls] = {"bf16": [partial(F.linear, x, weight) for weight in dense]}
                for name in CANONICAL_KERNELS:
                    calls[name] = [partial(KERNELS[name].run, x, weight, (), False) for weight in held]
                times = {name: graph_microseconds(many, repeats=3) for name, many in calls.items()}
                yield {"model": model, "out": out_features, "in": in_features, "tokens": num_tokens, **times}


def show_canonical(record: dict[str, object]) -> str:
    """A line: the time of each kernel, and of bf16."""
    times = ", ".join(f"{name} {record[name]:.1f} us" for name in ("bf16", *CANONICAL_KERNELS))
    return f"{record['model']} {record['out']}x{record['in']} m={record['tokens']}: {times}"


def show(record: dict[str, object]) -> str:
    """A line: time, rate of weights and of arithmetic of each format, and how much faster than bf16 and FP8."""
    out_features, in_features, tokens = (int(record[name]) for name in ("out", "in", "tokens"))  # type: ignore[call-overload]
    bits = {"bf16": 16.0, "fp8": 8.0, "w4a16": 4 + 32 / GROUP, "w4a8": 4 + 32 / GROUP}
    parts = [f"{record['model']} {out_features}x{in_features} m={tokens}:"]
    for name, size in bits.items():
        time = float(record[name])  # type: ignore[arg-type]
        rate = out_features * in_features * size / 8 / time / 1e3
        parts.append(
            f"{name} {time:.1f} us {rate:.0f} GB/s {2e-6 * tokens * out_features * in_features / time:.0f} TF,"
        )
    best = min(float(record["w4a16"]), float(record["w4a8"]))  # type: ignore[arg-type]
    parts.append(f"x bf16 {float(record['bf16']) / best:.2f}, x fp8 {float(record['fp8']) / best:.2f}")  # type: ignore[arg-type]
    return " ".join(parts)


def main() -> None:
    """Print the records; see the module's text."""
    parser = argparse.ArgumentParser(description="Time products with 4-bit weights beside bf16 and FP8")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, NUM_TOKENS)))
    parser.add_argument("--canonical", action="store_true", help="groups of 32, by each of their kernels")
    parser.add_argument("--json", type=Path, help="write the records here too")
    arguments = parser.parse_args()
    found = []
    make, line = (canonical_records, show_canonical) if arguments.canonical else (records, show)
    for record in make(arguments.models.split(","), [int(count) for count in arguments.tokens.split(",")]):
        found.append(record)
        print(line(record), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
