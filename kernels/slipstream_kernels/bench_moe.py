"""Time the products of MoE experts on a GPU: 4-bit weights beside FP8 and bf16, and the library's grouped products.

    python -m slipstream_kernels.bench_moe [--models mixtral-8x7b,...] [--rows 1,8,...] [--tokens 1,...]

Every expert has the same number of rows; or so many tokens choose their experts by chance. --variants times those of
the 4-bit kernel of FP8 rows too; --kernels each kernel of 4-bit weights beside 16-bit rows, prepacked (groups of 128)
and canonical (groups of 32). Each time is of a CUDA graph of calls that rotate over enough weights to miss the L2,
divided by their number: what a decode step pays. gate_up ends in silu(gate) * up, which the library does in a
launch of its own. Rows are quantised, and for the library gathered too, before. --routing times the choice of experts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from slipstream_kernels import ops
from slipstream_kernels.bench_fp8 import graph_microseconds
from slipstream_kernels.gemm.product import PLAIN_ROWS
from slipstream_kernels.kernel_choice import config_of
from slipstream_kernels.moe.choose import this_device
from slipstream_kernels.moe.cuda import grouped_w4a8_gemm
from slipstream_kernels.moe.kernels import KERNELS, Call
from slipstream_kernels.moe.product import Product as ExpertProduct
from slipstream_kernels.moe.tuning import tuning_of
from slipstream_kernels.ops import Int4Weight, Routing

# experts, of a token, (out, in features of gate_up), (of down)
MODELS = {
    "mixtral-8x7b": (8, 2, (28672, 4096), (4096, 14336)),
    "64-experts": (64, 8, (2816, 2048), (2048, 1408)),
    "qwen3-30b-a3b": (128, 8, (1536, 2048), (2048, 768)),
    "256-experts": (256, 8, (4096, 7168), (7168, 2048)),
}
NUM_ROWS = (1, 4, 8, 16, 32, 48, 128)
FORMATS = "fp8,w4a8,w4a16,block fp8,wint8,w8a8,torch fp8,bf16,torch bf16"
COLD_BYTES = 240 << 20  # weights that one graph goes through: four times the L2
GROUP, CANONICAL_GROUP = 128, 32
Calls = list[Callable[[], object]]


def even_routing(num_experts: int, top_k: int, rows: int) -> Routing:
    """As many rows for every expert."""
    num_tokens = rows * num_experts // top_k
    pairs = torch.arange(num_tokens * top_k, device="cuda") % num_experts
    logits = torch.zeros(num_tokens, num_experts, device="cuda").scatter_(1, pairs.view(num_tokens, top_k), 9.0)
    routing = ops.route_experts(logits, top_k)
    assert (routing.offsets.diff() == rows).all()
    return routing


def few_tokens(num_experts: int, top_k: int, num_tokens: int) -> Routing:
    """The routing of tokens that choose by chance."""
    logits = torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(num_tokens))
    return ops.route_experts(logits.cuda(), top_k)


def int4_weights(num_experts: int, size: tuple[int, int], num_copies: int, fp8_rows: bool) -> list[Int4Weight]:
    """Weights of random codes, in the device's order."""
    weights = canonical_weights(num_experts, size, num_copies, GROUP)
    return [ops.repack_expert_int4(weight, num_experts, fp8_rows=fp8_rows) for weight in weights]


def canonical_weights(
    num_experts: int, size: tuple[int, int], num_copies: int, group_size: int
) -> Iterator[Int4Weight]:
    rows, in_features = num_experts * size[0], size[1]
    for _ in range(num_copies):
        packed = torch.randint(256, (rows, in_features // 2), dtype=torch.uint8, device="cuda")
        scales = (0.5 + torch.rand(rows, in_features // group_size, device="cuda")) * in_features**-0.5 / 4
        yield Int4Weight(packed, scales, None, group_size, rows, in_features)


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


@dataclass(frozen=True)
class Product:
    """One product of a model, and weights of it in all formats that are asked for.

    variants, by_kernel: --variants and --kernels.
    """

    num_experts: int
    size: tuple[int, int]
    gated: bool
    formats: frozenset[str]
    variants: bool = False
    by_kernel: bool = False

    @cached_property
    def weights(self) -> dict[str, list[tuple[Any, ...]]]:
        """By kind, enough of each to miss the L2: the weight, and its scales if they stand apart."""
        count, size = self.num_experts, self.size
        copies = max(2, COLD_BYTES // (count * size[0] * size[1] // 2))
        kinds: dict[str, Callable[[], list[tuple[Any, ...]]]] = {
            "grouped_w4a8": lambda: [(weight,) for weight in int4_weights(count, size, copies, True)],
            "int4": lambda: [(weight,) for weight in int4_weights(count, size, copies, False)],
            "canonical": lambda: [(weight,) for weight in canonical_weights(count, size, copies, CANONICAL_GROUP)],
            "fp8": lambda: fp8_weights(count, size, 2),
            "int8": lambda: [(values.view(torch.int8), scales) for values, scales in fp8_weights(count, size, 2)],
            "dense": lambda: [(torch.randn(count, *size, device="cuda", dtype=torch.bfloat16),)],
            "blocks": lambda: [(values, self._block_scales()) for values, _ in fp8_weights(count, size, 2)],
        }
        wanted = {KINDS[name] for name in self.formats} | ({"int4", "canonical"} if self.by_kernel else set())
        return {kind: kinds[kind]() for kind in wanted}

    def _block_scales(self) -> torch.Tensor:
        one = ops.block_scales(*self.size, torch.device("cuda"))
        return torch.full((self.num_experts, *one.shape), 1e-3, device="cuda")

    def calls(self, routing: Routing) -> Iterator[tuple[str, Calls]]:
        """(format, calls of all weights)"""
        x = torch.randn(routing.num_rows, self.size[1], device="cuda", dtype=torch.bfloat16)
        fp8 = ops.quantize_fp8(x)
        rows = {"fp8": fp8, "torch fp8": fp8, "w4a8": fp8, "w8a8": ops.quantize_int8(x)}
        rows["block fp8"] = ops.quantize_fp8(x, ops.Fp8Scheme(128))
        for name in sorted(self.formats, key=FORMATS.split(",").index):
            op = ops.grouped_int4_mm if name.startswith("w4") else ops.grouped_mm
            op = partial(op, rows.get(name, x), gated=self.gated)
            if name.startswith("torch"):
                op = partial(op, backend="library")
            yield name, [partial(op, weight, routing, *scales) for weight, *scales in self.weights[KINDS[name]]]
        for variant in grouped_w4a8_gemm.VARIANTS if self.variants else ():
            call = partial(grouped_w4a8_gemm.grouped_int4_mm, fp8, by_token=False, gated=self.gated, variant=variant)
            weights = self.weights["grouped_w4a8"]
            yield f"{variant.columns}/{variant.warpgroups_m}", [partial(call, weight, routing) for (weight,) in weights]
        if self.by_kernel:
            yield from self._calls_by_kernel(x, routing)

    def _calls_by_kernel(self, x: torch.Tensor, routing: Routing) -> Iterator[tuple[str, Calls]]:
        """(kernel, calls of all weights) of 4-bit weights beside 16-bit rows, whichever the table chooses."""
        device = this_device(x.device)
        for kind in ("int4", "canonical"):
            held = [ops.int4_linear_weight(weight, num_experts=self.num_experts) for (weight,) in self.weights[kind]]
            described = held[0].kind
            product = ExpertProduct(described, routing.num_tokens, routing.num_rows, x.dtype, self.gated)
            for use in tuning_of(device.name).uses[described.format, PLAIN_ROWS]:
                config, _ = config_of(use.kernel, KERNELS[use.kernel], product, device)
                if config is not None and use.kernel != "reference":  # which reads offsets on the host
                    run = KERNELS[use.kernel].run
                    yield use.kernel, [partial(run, Call(x, one, routing, False, self.gated), config) for one in held]


KINDS = {
    "w4a8": "grouped_w4a8", "w4a16": "int4", "fp8": "fp8", "torch fp8": "fp8", "wint8": "int8", "w8a8": "int8",
    "bf16": "dense", "torch bf16": "dense", "block fp8": "blocks",
}  # fmt: skip


def records(
    models: list[str], counts: list[int], formats: frozenset[str], variants: bool, by_kernel: bool
) -> Iterator[dict[str, object]]:
    """One per model, product and number of rows (or, negative, of tokens): microseconds of each format."""
    for model in models:
        num_experts, top_k, *sizes = MODELS[model]
        for size, gated in zip(sizes, (True, False)):
            product = Product(num_experts, size, gated, formats, variants, by_kernel)
            for count in counts:
                routing = (even_routing if count > 0 else few_tokens)(num_experts, top_k, abs(count))
                times = {name: timed(many) for name, many in product.calls(routing)}
                yield {"model": model, "out": size[0], "in": size[1], "experts": num_experts, "rows": count, **times}
            del product


def routing_records(models: list[str], counts: list[int]) -> Iterator[dict[str, object]]:
    """One per model: microseconds of ops.route_experts by number of tokens."""
    for model in models:
        num_experts, top_k = MODELS[model][:2]
        many = [torch.randn(count, num_experts, device="cuda", dtype=torch.bfloat16) for count in counts]
        times = [timed([partial(ops.route_experts, logits, top_k)] * 20) for logits in many]
        yield {"model": model, **dict(zip(map(str, counts), times))}


def show(record: dict[str, Any]) -> str:
    """A line: times, rates of weights if all experts have rows, and how much faster 4 bits are than the fastest FP8."""
    elements = record["experts"] * record["out"] * record["in"]
    parts = [f"{record['model']} {record['out']}x{record['in']} rows={record['rows']}:"]
    bits = {"fp8": 8, "torch fp8": 8, "bf16": 16, "torch bf16": 16, "w4a16": 4.25, "w4a8": 4.25}
    for name in [name for name in record if name not in ("model", "out", "in", "experts", "rows")]:
        time = record[name]
        if not isinstance(time, float):
            parts.append(f"{name} ({time}),")
        elif name in bits and record["rows"] > 0:
            parts.append(f"{name} {time:.0f} us {elements * bits[name] / 8 / time / 1e3:.0f} GB/s,")
        else:
            parts.append(f"{name} {time:.1f} us,")
    fp8 = [record[name] for name in ("fp8", "torch fp8") if isinstance(record.get(name), float)]
    if isinstance(record.get("w4a8"), float) and fp8:
        parts.append(f"x fp8 {min(fp8) / record['w4a8']:.2f}")
    return " ".join(parts)


def main() -> None:
    """Print the records; see the module's text."""
    parser = argparse.ArgumentParser(description="Time the products of MoE experts")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default=",".join(map(str, NUM_ROWS)))
    parser.add_argument("--tokens", default="", help="routed by chance")
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--variants", action="store_true", help="of the 4-bit kernel of FP8 rows")
    parser.add_argument("--kernels", action="store_true", help="each of 4-bit weights beside 16-bit rows")
    parser.add_argument("--routing", action="store_true", help="of --tokens, instead of products")
    parser.add_argument("--json", type=Path, help="write the records here too")
    arguments = parser.parse_args()
    found = []
    if arguments.routing:
        tokens = [int(count) for count in arguments.tokens.split(",")]
        for record in routing_records(arguments.models.split(","), tokens):
            print(" ".join(f"{key}: {value}" for key, value in record.items()), flush=True)
        return
    counts = [int(count) for count in arguments.rows.split(",") if count]
    counts += [-int(count) for count in arguments.tokens.split(",") if count]
    formats = frozenset(name for name in arguments.formats.split(",") if name)
    options = formats, arguments.variants, arguments.kernels
    for record in records(arguments.models.split(","), counts, *options):
        found.append(record)
        print(show(record), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
