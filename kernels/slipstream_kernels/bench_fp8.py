"""Time FP8 products and the elementwise ops around them on a GPU against bf16, in the shapes of Llama-3-8B.

    python -m slipstream_kernels.bench_fp8 [--json out.json] [--tune [--part 0/8]]

Each time is the mean of the calls in a CUDA graph that rotate over enough weights to miss the L2, as in a decode step.
--tune times every candidate tile of our own kernel; --part I/N only compiles the I-th part of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from slipstream_kernels import ops
from slipstream_kernels.ops import Fp8Rows, Fp8Scheme

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # qkv, o, gate_up, down: out, in features
NUM_TOKENS = (1, 8, 32, 64, 128, 256, 1024, 8192)
COLD_BYTES = 400 << 20  # weights that one graph goes through: far more than the 60 MB of L2
SCHEMES = {"row": Fp8Scheme(), "block": Fp8Scheme(128)}
# Candidates for the tiles of our own kernel: (output features, warps), blocks in flight, programs aimed at.
CANDIDATE_TILES, CANDIDATE_STAGES, CANDIDATE_PROGRAMS = ((64, 4), (128, 4), (128, 8)), (4, 5, 6), (132, 264, 528)
Weight = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def graph_microseconds(calls: list[Callable[[], object]], repeats: int = 5) -> float:
    """Median time of one call, out of replays of a graph of all."""
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def fp8_weights(out_features: int, in_features: int, kind: str) -> list[Weight]:
    """(values, scales, counters) of different weights, together larger than the cache."""
    copies = max(2, COLD_BYTES // (out_features * in_features))
    weights = []
    for _ in range(copies):
        weight = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16) / in_features**0.5
        if kind == "row":
            rows = ops.quantize_fp8(weight)
            values, scales = rows.values, rows.scales.view(-1)
        else:
            values, blocks = ops.quantize_fp8_blocks(weight)
            scales = ops.block_scales(out_features, in_features, weight.device)
            scales[:, : blocks.shape[1]] = blocks
        weights.append((values, scales, ops.scaled_mm_counters(weight)))
    return weights


def fp8_calls(rows: Fp8Rows, weights: list[Weight], backend: str) -> list[Callable[[], object]]:
    return [
        partial(ops.scaled_mm, rows, values, scales, counters=counters, backend=backend)
        for values, scales, counters in weights
    ]


def product_rows() -> Iterator[dict[str, object]]:
    """One record per shape and number of tokens: microseconds of bf16 and of each FP8 kind and implementation."""
    for out_features, in_features in SHAPES:
        size = out_features * in_features
        dense = [
            torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16)
            for _ in range(max(2, COLD_BYTES // (2 * size)))
        ]
        quantised = {kind: fp8_weights(out_features, in_features, kind) for kind in SCHEMES}
        for num_tokens in NUM_TOKENS:
            x = torch.randn(num_tokens, in_features, device="cuda", dtype=torch.bfloat16)
            record: dict[str, object] = {"out": out_features, "in": in_features, "tokens": num_tokens}
            record["bf16"] = graph_microseconds([partial(F.linear, x, w) for w in dense])
            for kind, scheme in SCHEMES.items():
                rows = ops.quantize_fp8(x, scheme)
                for backend in ("library", "triton") if num_tokens <= 256 else ("library",):
                    name = f"{kind} {backend}"
                    try:
                        record[name] = graph_microseconds(fp8_calls(rows, quantised[kind], backend))
                    except (RuntimeError, ValueError) as error:  # cuBLASLt has no algorithm for some
                        record[name] = str(error).splitlines()[0]
            yield record


def elementwise_rows(hidden: int = 4096, intermediate: int = 14336) -> Iterator[dict[str, object]]:
    """GB/s of the fused ops, and of the norm and silu·mul without quantisation."""
    for num_tokens in (1, 32, 128, 4096, 8192):
        copies = max(2, COLD_BYTES // (num_tokens * intermediate * 4)) if num_tokens > 128 else 20
        weight = torch.rand(hidden, device="cuda").bfloat16()
        xs = [torch.randn(num_tokens, hidden, device="cuda").bfloat16() for _ in range(copies)]
        gated = [torch.randn(num_tokens, 2 * intermediate, device="cuda").bfloat16() for _ in range(copies)]
        norm = (weight, 1e-5)
        cases: dict[str, tuple[int, list[Callable[[], object]]]] = {
            "rms_norm + residual": (8 * hidden, [partial(ops.rms_norm, x, *norm, y) for x, y in zip(xs, reversed(xs))]),
            "silu_mul": (6 * intermediate, [partial(ops.silu_mul, x) for x in gated]),
        }
        for kind, scheme in SCHEMES.items():
            norms = [partial(ops.rms_norm_fp8, x, *norm, y, scheme) for x, y in zip(xs, reversed(xs))]
            cases[f"quantize {kind}"] = (3 * hidden, [partial(ops.quantize_fp8, x, scheme) for x in xs])
            cases[f"rms_norm + residual + quantize {kind}"] = (7 * hidden, norms)
            silus: list[Callable[[], object]] = [partial(ops.silu_mul_fp8, x, scheme) for x in gated]
            cases[f"silu_mul + quantize {kind}"] = (5 * intermediate, silus)
        for name, (bytes_per_token, calls) in cases.items():
            microseconds = graph_microseconds(calls)
            rate = bytes_per_token * num_tokens / microseconds / 1e3
            yield {"op": name, "tokens": num_tokens, "us": microseconds, "GB/s": rate}


def candidate_rows(part: tuple[int, int] | None) -> Iterator[dict[str, object]]:
    """Microseconds of every candidate tile; with part=(i, n) the i-th n-th of the candidates is only compiled."""
    from slipstream_kernels.gemm.triton import scaled_mm as own

    tiles = [
        own.Tile(block_n, num_warps, num_stages, num_programs)
        for (block_n, num_warps), num_stages, num_programs in itertools.product(
            CANDIDATE_TILES, CANDIDATE_STAGES, CANDIDATE_PROGRAMS
        )
    ]
    weights: dict[tuple[int, int, str], list[Weight]] = {}
    for index, (shape, block_m, tile, kind) in enumerate(itertools.product(SHAPES, (16, 32, 64), tiles, SCHEMES)):
        if part is not None and index % part[1] != part[0]:
            continue
        own.TILES[kind == "block", block_m] = tile
        rows = ops.quantize_fp8(torch.randn(block_m, shape[1], device="cuda").bfloat16(), SCHEMES[kind])
        if (*shape, kind) not in weights:
            weights = {key: value for key, value in weights.items() if key[:2] == shape}
            made = fp8_weights(*shape, kind)
            weights[(*shape, kind)] = made[:1] if part else made
        calls = fp8_calls(rows, weights[(*shape, kind)], "triton")
        record = {"shape": shape, "block_m": block_m, "kind": kind, "tile": tuple(vars(tile).values())}
        try:
            if part is None:
                record["us"] = graph_microseconds(calls, repeats=3)
            else:
                calls[0]()
        except RuntimeError as error:  # out of shared memory
            record["us"], record["error"] = float("inf"), str(error).splitlines()[0]
        yield record


def show(record: dict[str, object]) -> str:
    return "  ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items())


def best_tiles(records: list[dict[str, object]]) -> Iterator[str]:
    """The three best tiles of each rows, shape and kind; then by the product of times over shapes."""
    ordered = sorted(records, key=lambda r: (r["block_m"], r["kind"], r["shape"], r["us"]))
    for _, group in itertools.groupby(ordered, key=lambda r: (r["block_m"], r["kind"], r["shape"])):
        best = list(group)[:3]
        yield f"{best[0]['block_m']} {best[0]['kind']} {best[0]['shape']}: " + ", ".join(
            f"{r['tile']} {r['us']:.1f}" for r in best
        )
    totals: dict[tuple[object, ...], float] = {}
    for record in records:
        key = (record["block_m"], record["kind"], record["tile"])
        totals[key] = totals.get(key, 1.0) * float(record["us"])  # type: ignore[arg-type]
    for block_m, kind in sorted({key[:2] for key in totals}, key=str):
        chosen = sorted((total, key[2]) for key, total in totals.items() if key[:2] == (block_m, kind))[:3]
        yield f"overall {block_m} {kind}: {', '.join(f'{tile} {total**0.25:.2f}' for total, tile in chosen)}"


def main() -> None:
    """Print the records; see the module's text."""
    parser = argparse.ArgumentParser(description="Time the FP8 ops of slipstream_kernels")
    parser.add_argument("--json", type=Path, help="write the records here too")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--part", default="", help="I/N: compile the I-th part of the candidates, time nothing")
    arguments = parser.parse_args()
    part = tuple(map(int, arguments.part.split("/"))) if arguments.part else None
    records: list[dict[str, object]] = []
    if arguments.tune:
        records += candidate_rows(part)  # type: ignore[arg-type]
        print("\n".join(best_tiles(records)) if part is None else f"{len(records)} compiled", flush=True)
    else:
        for record in itertools.chain(product_rows(), elementwise_rows()):
            records.append(record)
            print(show(record), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
