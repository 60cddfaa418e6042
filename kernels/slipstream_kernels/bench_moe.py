"""Time the products of MoE experts on a GPU: 4-bit weights beside FP8 and bf16, and the library's grouped products.

    python -m slipstream_kernels.bench_moe [--models mixtral-8x7b,...] [--rows 1,8,...] [--json out.json]

Every expert has the same number of rows. Each time is of a CUDA graph of calls that rotate over enough weights to miss
the L2, divided by their number: what a decode step pays. gate_up ends in silu(gate) * up, which the library does in a
launch of its own. Rows are quantised, and for the library gathered too, before.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from slipstream_kernels import ops
from slipstream_kernels.bench_fp8 import graph_microseconds
from slipstream_kernels.ops import Int4Weight, Routing

# experts, of a token, (out, in features of gate_up), (of down)
MODELS = {
    "mixtral-8x7b": (8, 2, (28672, 4096), (4096, 14336)),
    "64-experts": (64, 8, (2816, 2048), (2048, 1408)),
    "256-experts": (256, 8, (4096, 7168), (7168, 2048)),
}
NUM_ROWS = (1, 4, 8, 16, 32, 48, 128)
COLD_BYTES = 240 << 20  # weights that one graph goes through: four times the L2
GROUP = 128
Calls = list[Callable[[], object]]


def even_routing(num_experts: int, top_k: int, rows: int) -> Routing:
    """As many rows for every expert."""
    num_tokens = rows * num_experts // top_k
    pairs = torch.arange(num_tokens * top_k, device="cuda") % num_experts
    logits = torch.zeros(num_tokens, num_experts, device="cuda").scatter_(1, pairs.view(num_tokens, top_k), 9.0)
    routing = ops.route_experts(logits, top_k)
    assert (routing.offsets.diff() == rows).all()
    return routing


def int4_weights(num_experts: int, size: tuple[int, int], num_copies: int) -> list[Int4Weight]:
    """Of random codes, in the device's order."""
    weights = []
    rows, in_features = num_experts * size[0], size[1]
    for _ in range(num_copies):
        packed = torch.randint(256, (rows, in_features // 2), dtype=torch.uint8, device="cuda")
        scales = (0.5 + torch.rand(rows, in_features // GROUP, device="cuda")) * in_features**-0.5 / 4
        weights.append(ops.repack_expert_int4(Int4Weight(packed, scales, None, GROUP, rows, in_features), num_experts))
    return weights


def fp8_weights(num_experts: int, size: tuple[int, int], num_copies: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(values, scales) of random bytes that are numbers."""
    weights = []
    for _ in range(num_copies):
        values = torch.randint(-119, 120, (num_experts, *size), dtype=torch.int8, device="cuda")
        weights.append((values.view(torch.float8_e4m3fn), torch.full((num_experts, size[0]), 1e-3, device="cuda")))
    return weights


def timed(calls: Calls) -> float | str:
    try:
        return graph_microseconds(calls, repeats=3)
    except (RuntimeError, ValueError, AttributeError, NotImplementedError) as error:
        return str(error).splitlines()[0][:80]


def records(models: list[str], rows: list[int], with_library: bool) -> Iterator[dict[str, object]]:
    """One per model, product and number of rows: microseconds of each format."""
    for model in models:
        num_experts, top_k, *sizes = MODELS[model]
        for size, gated in zip(sizes, (True, False)):
            copies = max(2, COLD_BYTES // (num_experts * size[0] * size[1] // 2))
            int4 = int4_weights(num_experts, size, copies)
            fp8 = fp8_weights(num_experts, size, 2)
            dense = [torch.randn(num_experts, *size, device="cuda", dtype=torch.bfloat16)] if with_library else []
            for count in rows:
                routing = even_routing(num_experts, top_k, count)
                x = torch.randn(routing.num_rows, size[1], device="cuda", dtype=torch.bfloat16)
                quantised = ops.quantize_fp8(x)
                calls: dict[str, Calls] = {
                    "fp8": [partial(ops.grouped_mm, quantised, w[0], routing, w[1], gated=gated) for w in fp8],
                    "w4a8": [partial(ops.grouped_int4_mm, quantised, w, routing, gated=gated) for w in int4],
                    "w4a16": [partial(ops.grouped_int4_mm, x, w, routing, gated=gated) for w in int4],
                }
                if with_library:
                    by_library = partial(ops.grouped_mm, gated=gated, backend="library")
                    calls["torch fp8"] = [partial(by_library, quantised, w[0], routing, w[1]) for w in fp8]
                    calls["bf16"] = [partial(ops.grouped_mm, x, w, routing, gated=gated) for w in dense]
                    calls["torch bf16"] = [partial(by_library, x, w, routing) for w in dense]
                times = {name: timed(many) for name, many in calls.items()}
                yield {"model": model, "out": size[0], "in": size[1], "experts": num_experts, "rows": count, **times}
            del int4, fp8, dense


def show(record: dict[str, object]) -> str:
    """A line: times, rates of weights, and how much faster 4 bits are than the fastest FP8."""
    elements = int(record["experts"]) * int(record["out"]) * int(record["in"])  # type: ignore[call-overload]
    parts = [f"{record['model']} {record['out']}x{record['in']} rows={record['rows']}:"]
    bits = {"fp8": 8, "torch fp8": 8, "bf16": 16, "torch bf16": 16, "w4a16": 4 + 32 / GROUP, "w4a8": 4 + 32 / GROUP}
    times = {name: record[name] for name in bits if isinstance(record.get(name), float)}
    for name in bits:
        if name in times:
            parts.append(f"{name} {times[name]:.0f} us {elements * bits[name] / 8 / times[name] / 1e3:.0f} GB/s,")  # type: ignore[operator]
        elif name in record:
            parts.append(f"{name} ({record[name]}),")
    fp8 = [times[name] for name in ("fp8", "torch fp8") if name in times]
    if "w4a8" in times and fp8:
        parts.append(f"x fp8 {min(fp8) / times['w4a8']:.2f}")  # type: ignore[operator, type-var]
    return " ".join(parts)


def main() -> None:
    """Print the records; see the module's text."""
    parser = argparse.ArgumentParser(description="Time the products of MoE experts")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default=",".join(map(str, NUM_ROWS)))
    parser.add_argument("--no-library", action="store_true", help="leave out torch's grouped products")
    parser.add_argument("--json", type=Path, help="write the records here too")
    arguments = parser.parse_args()
    found = []
    rows = [int(count) for count in arguments.rows.split(",")]
    for record in records(arguments.models.split(","), rows, not arguments.no_library):
        found.append(record)
        print(show(record), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
