"""All layers of a decode step: kernels in a chain beside one launch, right first, then microseconds a layer.

    python tests/bench/bench_layers.py --check
    python tests/bench/bench_layers.py --weights fp8,int4,bf16 --tokens 1,2,4,8 --context 1024 [--layers 32]

Llama-3-8B's layers, random weights and keys. A step is a CUDA graph of one token of each request through all layers:
their weights are many times the L2. chain: the ops that the decoder calls. one: the one launch; with --ablate also with
other numbers of slots asked for at once (under_1 to under_5) and pieces of keys for each CTA (share_2, share_4).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))

from layers_emulator import Sizes, draw_rows, draw_stack  # noqa: E402
from slipstream_kernels import ops  # noqa: E402
from slipstream_kernels.cuda.device import count_sms  # noqa: E402
from slipstream_kernels.fused_decode.cuda import decode_layers as cuda_layers  # noqa: E402
from slipstream_kernels.kv_cache import FP8_DTYPE  # noqa: E402

DEVICE = torch.device("cuda")
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": FP8_DTYPE}
LLAMA = Sizes(hidden=4096, q_heads=32, kv_heads=8, intermediate=14336, layers=32, block_size=64, num_blocks=0)
PEAK_BYTES_PER_S = 4.3e12  # a copy on an H200
TOLERANCE = 2e-2

Step = Callable[[], torch.Tensor]


def multiply(x: torch.Tensor, weight: ops.StackWeight, gated: bool = False) -> torch.Tensor:
    if isinstance(weight, ops.Int4Weight):
        return ops.int4_mm(x, weight, gated=gated)
    if isinstance(weight, ops.ScaledRows):
        return ops.skinny_gemm(x, weight.values, weight.scales, gated=gated)
    return ops.skinny_gemm(x, weight, gated=gated)


def chain(hidden: torch.Tensor, stack: ops.LayerStack, rows: ops.StackRows) -> torch.Tensor:
    """What the decoder's loop does in such a step."""
    residual: torch.Tensor | None = None
    starts = torch.arange(len(hidden) + 1, dtype=torch.int32, device=hidden.device)
    counts = (stack.num_q_heads, stack.num_kv_heads, stack.num_kv_heads)
    for layer in stack.layers:
        normed, residual = norm(hidden, layer.input_norm, stack.eps, residual)
        q, k, v = multiply(normed, layer.qkv).unflatten(1, (-1, stack.head_dim)).split(counts, dim=1)
        cache = layer.cache
        q = ops.rope_write_kv(q, k, v, rows.positions, rows.slot_mapping, stack.rope, cache)
        attended = ops.decode_attention(
            q, cache.key, cache.value, rows.block_tables, starts, rows.seq_lens, max_query_len=1, scale=stack.scale,
            key_scale=cache.key_scale, value_scale=cache.value_scale, is_prefix_settled=True,
        )  # fmt: skip
        normed, residual = norm(multiply(attended.flatten(1), layer.o), layer.post_attention_norm, stack.eps, residual)
        hidden = multiply(multiply(normed, layer.gate_up, gated=True), layer.down)
    assert residual is not None
    return hidden + residual


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if residual is None:
        return ops.rms_norm(x, weight, eps), x  # type: ignore[return-value]
    return ops.rms_norm(x, weight, eps, residual)  # type: ignore[return-value]


def steps(hidden: torch.Tensor, stack: ops.LayerStack, rows: ops.StackRows, ablate: bool) -> dict[str, Step]:
    def launch(**changes: int) -> Step:
        how = replace(cuda_layers.Launch(count_sms(DEVICE)), **changes)
        return lambda: cuda_layers.decode_layers(hidden, stack, rows, how)

    found: dict[str, Step] = {"chain": lambda: chain(hidden, stack, rows), "one": launch()}
    if ablate:
        found |= {f"under_{slots}": launch(slots_under_way=slots) for slots in (1, 2, 4, 5)}
        found |= {f"share_{pieces}": launch(min_share=pieces) for pieces in (2, 4)}
    return found


def milliseconds(step: Step, replays: int = 9) -> float:
    """Median of replays of a graph of the step."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def timed(step: Step, layers: int) -> float | str:
    """Microseconds a layer, or why there are none: one way to launch may be refused where the others work."""
    try:
        return round(milliseconds(step) / layers * 1e3, 1)
    except RuntimeError as error:
        return f"failed: {str(error).splitlines()[0]}"


def floor_ms(stack: ops.LayerStack, seq_lens: list[int]) -> float:
    """Of the bytes that must be read."""
    total = 0
    for layer in stack.layers:
        for weight in layer.products:
            if isinstance(weight, ops.Int4Weight):
                total += weight.packed.nbytes + weight.scales.nbytes // 2
            else:
                total += weight.values.nbytes if isinstance(weight, ops.ScaledRows) else weight.nbytes
        row = layer.cache.key.shape[1] * layer.cache.key.shape[3] * layer.cache.key.itemsize
        total += 2 * row * sum(seq_lens)
    return total / PEAK_BYTES_PER_S * 1e3


def sized(layers: int, seq_lens: list[int]) -> Sizes:
    blocks = sum(-(-length // LLAMA.block_size) for length in seq_lens)
    return replace(LLAMA, layers=layers, num_blocks=max(blocks, 80))


def check(weights: list[str], kvs: list[str]) -> bool:
    """The one launch against the chain of ops, and against itself; prints a line each."""
    fine = True
    for kind in weights:
        for kv in kvs:
            for num_tokens in (1, 2, 4, 8):
                for length in (1, 1000, 1024, 5000):
                    seq_lens = [length] * num_tokens
                    fine &= check_one(kind, kv, seq_lens)
            fine &= check_one(kind, kv, [5000, 1, 1000, 0, 64, 65, 1024, 63])
    return fine


def check_one(kind: str, kv: str, seq_lens: list[int]) -> bool:
    sizes = sized(2, seq_lens)
    stack, rows = draw_stack(sizes, kind, KV_DTYPES[kv], DEVICE), draw_rows(sizes, seq_lens, DEVICE)
    hidden = torch.randn(len(seq_lens), sizes.hidden, device=DEVICE).bfloat16()
    live = torch.tensor([length > 0 for length in seq_lens], device=DEVICE)
    found = {name: step()[live].double() for name, step in steps(hidden, stack, rows, False).items()}
    again = cuda_layers.decode_layers(hidden, stack, rows)[live].double()
    torch.cuda.synchronize()
    error = float((found["one"] - found["chain"]).norm() / found["chain"].norm())
    fine = error < TOLERANCE and torch.equal(again, found["one"])
    print(f"{'ok ' if fine else 'BAD'} {kind} {kv}-kv {seq_lens}: {error:.1e} off the chain", flush=True)
    return fine


def measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    lines = []
    for kind in arguments.weights.split(","):
        for kv in arguments.kv.split(","):
            for num_tokens in (int(number) for number in arguments.tokens.split(",")):
                seq_lens = [arguments.context] * num_tokens
                sizes = sized(arguments.layers, seq_lens)
                stack, rows = draw_stack(sizes, kind, KV_DTYPES[kv], DEVICE), draw_rows(sizes, seq_lens, DEVICE)
                hidden = torch.randn(num_tokens, sizes.hidden, device=DEVICE).bfloat16()
                line: dict[str, object] = {"weights": kind, "kv": kv, "tokens": num_tokens}
                line["floor"] = round(floor_ms(stack, seq_lens) / sizes.layers * 1e3, 1)
                for name, step in steps(hidden, stack, rows, arguments.ablate).items():
                    line[name] = timed(step, sizes.layers)
                lines.append(line)
                print("  ".join(f"{key} {value}" for key, value in line.items()), flush=True)
                del stack, rows
                torch.cuda.empty_cache()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare results instead of times")
    parser.add_argument("--ablate", action="store_true", help="time each idea left out, too")
    parser.add_argument("--weights", default="fp8,int4,bf16")
    parser.add_argument("--kv", default="fp8")
    parser.add_argument("--tokens", default="1,2,4,8")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.check:
        sys.exit(0 if check(arguments.weights.split(","), arguments.kv.split(",")) else 1)
    lines = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
