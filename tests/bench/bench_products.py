"""Time the matrix products of a layer in every format and for every number of tokens, as the engine multiplies them.

    python tests/bench/bench_products.py [--shapes llama3-8b,...] [--formats fp8,...] [--tokens 1,8,...] [--out o.jsonl]

qkv, o, gate_up with silu(gate) * up, and down, each through the layer and method that serve it, on inputs that are in
the method's form already: norms, which quantise the others' inputs, are left out. Microseconds of a CUDA graph of calls
that rotate over more weights than the L2 holds. Prints a table a shape: the four together, then how many times faster
one format is than another, of all four (of the worst of them).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/bench"))

from format_table import Cells, side_by_side  # noqa: E402
from measures import Record, emit, numbers  # noqa: E402
from shapes import SHAPES, Shape  # noqa: E402
from slipstream.nn.layer_context import LayerContext  # noqa: E402
from slipstream.nn.layer_spec import LinearSpec  # noqa: E402
from slipstream.nn.linear import Linear  # noqa: E402
from slipstream.nn.quant import QUANT_METHODS  # noqa: E402
from slipstream_kernels.bench_fp8 import graph_microseconds  # noqa: E402

FORMATS = ("none", "fp8", "block_wise_fp8", "wint8", "w8a8_int8", "wint4", "w4a8_fp8")
NUM_TOKENS = (1, 8, 16, 32, 48, 64, 128, 256, 512, 1024, 4096, 8192)
GATED = "gate_up"
COLD_BYTES = 240 << 20  # weights that one graph goes through: four times the L2
Calls = list[Callable[[], object]]


def linear_specs(shape: Shape) -> dict[str, LinearSpec]:
    """The products of a layer; gate_up is followed by down, in whose form it leaves its result."""
    kv_rows, q_rows = shape.kv_heads * shape.head_dim, shape.q_heads * shape.head_dim
    return {
        "qkv": LinearSpec(shape.hidden, (("q", q_rows), ("k", kv_rows), ("v", kv_rows))),
        "o": LinearSpec(q_rows, (("o", shape.hidden),)),
        GATED: LinearSpec(shape.hidden, (("gate", shape.intermediate), ("up", shape.intermediate))),
        "down": LinearSpec(shape.intermediate, (("down", shape.hidden),)),
    }


def random_layers(spec: LinearSpec, context: LayerContext) -> list[Linear]:
    """Quantised from random weights, together larger than the cache."""
    layers: list[Linear] = []
    while len(layers) < 2 or len(layers) * held_bytes(layers[0]) < COLD_BYTES * (context.device.type == "cuda"):
        layer = Linear(spec, context)
        for _, _, slot in layer.slots():
            slot.load(torch.randn(slot.shape, device=context.device, dtype=context.dtype) * spec.in_features**-0.5)
        layers.append(layer)
    return layers


def held_bytes(layer: Linear) -> int:
    return sum(tensor.nbytes for tensor in layer.weights.values())


def calls(name: str, layers: list[Linear], x: torch.Tensor, down: Linear) -> Calls:
    """One for each layer. x: plain rows. down: the layer that reads what gate_up leaves."""
    rows = layers[0].activation_quant.cast(x)
    if name == GATED:
        return [lambda layer=layer: layer.apply_gated(rows, down.activation_quant) for layer in layers]
    return [lambda layer=layer: layer.apply(rows) for layer in layers]


def microseconds(many: Calls, device: torch.device) -> float:
    """Median of one call."""
    if device.type == "cuda":
        return graph_microseconds(many, repeats=3)
    times = []
    for call in many:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def records(shape: str, form: str, tokens: list[int], device: torch.device) -> Iterator[Record]:
    """One for each number of tokens: microseconds of each product. None for a format that the device cannot serve."""
    method = QUANT_METHODS.get(form)
    reason = method.supports(device, torch.bfloat16)
    if reason:
        print(f"{form} is left out: {reason}", file=sys.stderr)
        return
    context = LayerContext(device, torch.bfloat16, method, method)
    specs = linear_specs(SHAPES[shape])
    down, found = random_layers(specs["down"], context)[0], {count: dict[str, float]() for count in tokens}
    for name, spec in specs.items():
        layers = random_layers(spec, context)
        for count in tokens:
            x = torch.randn(count, spec.in_features, device=device, dtype=torch.bfloat16)
            found[count][name] = round(microseconds(calls(name, layers, x, down), device), 2)
    for count, times in found.items():
        yield {"what": "products", "shape": shape, "format": form, "tokens": count, "us": times}


def show(record: Record) -> str:
    total = sum(record["us"].values())
    return f"{total:.1f}" if total < 1000 else f"{total:,.0f}"


def ratio(fast: Record, slow: Record) -> str:
    """The speed-up of the layer (and of the product that gains least)."""
    worst = min(slow["us"][name] / fast["us"][name] for name in fast["us"])
    return f"{sum(slow['us'].values()) / sum(fast['us'].values()):.2f} ({worst:.2f})"


def table(shape: str, found: list[Record]) -> str:
    cells: Cells = {(record["format"], record["tokens"]): record for record in found if record["shape"] == shape}
    return side_by_side(f"{shape}: us of a layer's products, by tokens", cells, show, ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama3-8b,baichuan2-13b,llama3-70b")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--tokens", type=numbers, default=list(NUM_TOKENS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="JSON lines are appended to this file")
    arguments = parser.parse_args()
    if arguments.device != "cpu":
        torch.backends.cuda.preferred_blas_library("cublaslt")  # as the engine has it
    for shape in arguments.shapes.split(","):
        found: list[Record] = []
        for form in arguments.formats.split(","):
            for record in records(shape, form, arguments.tokens, torch.device(arguments.device)):
                found.append(record)
                emit(record, arguments.out)
        print(table(shape, found), flush=True)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
