"""Times the fused elementwise ops on a GPU from one row to thousands: microseconds, fraction of the copy rate.

`python -m slipstream_kernels.bench_elementwise [--only gelu,logits]`.  A CUDA graph launches over several inputs with
PDL, as in an engine's step.  Few rows stay in the L2, as in a step, where the previous kernel has just written them;
thousands do not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F

from slipstream_kernels import ops
from slipstream_kernels.bench_decode import copy_tbps

COLD_BYTES = 256 << 20
LAUNCHES = 64
REPLAYS = 9
MOST_LOGITS = 512  # rows of logits: a step has those of its requests, not of its tokens
LAUNCH_BOUND_ROWS = 64  # up to here a share of the bandwidth says nothing
HEADS, HEAD_DIM, BLOCK_SIZE = (32, 8, 8), 128, 64  # of rope + write_kv: q, k, v

Run = Callable[[int], object]


def cases(num_rows: int, hidden_size: int, intermediate_size: int) -> dict[str, tuple[Run, int]]:
    """name -> (one launch over the i-th input, bytes read and written).  bf16; fp8 with a scale per row or group."""
    sets = min(LAUNCHES, max(2, COLD_BYTES // (num_rows * hidden_size * 2)))
    x, residual = torch.randn(2, sets, num_rows, hidden_size, device="cuda").bfloat16().unbind(0)
    gated = torch.randn(max(2, sets // 4), num_rows, 2 * intermediate_size, device="cuda").bfloat16()
    weight = torch.ones(hidden_size, device="cuda").bfloat16()
    by_row, by_group = ops.Fp8Scheme(), ops.Fp8Scheme(group_size=128)
    norm_bytes, silu_bytes = num_rows * hidden_size, num_rows * intermediate_size

    def norm(scheme: ops.Fp8Scheme | None) -> Run:
        if scheme is None:
            return lambda i: ops.rms_norm(x[i % sets], weight, 1e-5, residual[i % sets])
        return lambda i: ops.rms_norm_fp8(x[i % sets], weight, 1e-5, residual[i % sets], scheme)

    return {
        "residual + rms_norm": (norm(None), 8 * norm_bytes),
        "residual + rms_norm, fp8 by row": (norm(by_row), 7 * norm_bytes),
        "residual + rms_norm, fp8 by group": (norm(by_group), 7 * norm_bytes),
        "silu_mul": (lambda i: ops.silu_mul(gated[i % len(gated)]), 6 * silu_bytes),
        "silu_mul, fp8 by row": (lambda i: ops.silu_mul_fp8(gated[i % len(gated)], by_row), 5 * silu_bytes),
        "silu_mul, fp8 by group": (lambda i: ops.silu_mul_fp8(gated[i % len(gated)], by_group), 5 * silu_bytes),
        "gelu_mul": (lambda i: ops.gelu_mul(gated[i % len(gated)]), 6 * silu_bytes),
        "gelu_mul, fp8 by row": (lambda i: ops.gelu_mul_fp8(gated[i % len(gated)], by_row), 5 * silu_bytes),
        "gelu_mul, fp8 by group": (lambda i: ops.gelu_mul_fp8(gated[i % len(gated)], by_group), 5 * silu_bytes),
        "gelu by torch, product": (lambda i: torch_gelu_mul(gated[i % len(gated)]), 6 * silu_bytes),
        "gelu by torch, product, fp8 by row": (
            lambda i: ops.quantize_fp8(torch_gelu_mul(gated[i % len(gated)]), by_row),
            5 * silu_bytes,
        ),
        "quantize_fp8 by row": (lambda i: ops.quantize_fp8(x[i % sets], by_row), 3 * norm_bytes),
    }


def torch_gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """As two kernels of torch, which gelu_mul replaced."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def logit_cases(num_rows: int, vocab_size: int) -> dict[str, tuple[Run, int]]:
    """The same of scaled and capped logits, and of torch's passes over them, which scale_logits replaced."""
    if num_rows > MOST_LOGITS:
        return {}
    sets = min(LAUNCHES, max(2, COLD_BYTES // (num_rows * vocab_size * 2)))
    logits = torch.randn(sets, num_rows, vocab_size, device="cuda").bfloat16()
    num_bytes = 6 * num_rows * vocab_size

    def torch_capped(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.float() * 1.0 / 30.0) * 30.0

    return {
        "scale_logits, factor": (lambda i: ops.scale_logits(logits[i % sets], 0.125), num_bytes),
        "scale_logits, cap": (lambda i: ops.scale_logits(logits[i % sets], 1.0, 30.0), num_bytes),
        "logits by torch, factor": (lambda i: logits[i % sets].float() * 0.125, num_bytes),
        "logits by torch, cap": (lambda i: torch_capped(logits[i % sets]), num_bytes),
    }


def rope_cases(num_rows: int) -> dict[str, tuple[Run, int]]:
    """The same of rope + quantise + append, over caches of every type."""
    sets = min(LAUNCHES, max(2, COLD_BYTES // (num_rows * sum(HEADS) * HEAD_DIM * 2)))
    fused = torch.randn(sets, num_rows, sum(HEADS), HEAD_DIM, device="cuda").bfloat16()
    qk_rope = ops.QKRope(ops.Rope(torch.randn(num_rows, HEAD_DIM, device="cuda")))
    positions = torch.arange(num_rows, device="cuda")
    slots = ops.TokenSlots(positions, positions)

    def case(kv_dtype: torch.dtype) -> tuple[Run, int]:
        dims = (num_rows // BLOCK_SIZE + 1, HEADS[1], BLOCK_SIZE, HEAD_DIM)
        caches = [ops.empty_kv_cache(dims, kv_dtype, fused.device) for _ in range(sets)]

        def run(i: int) -> object:
            q, k, v = fused[i % sets].split(HEADS, dim=1)
            return ops.rope_write_kv(q, k, v, slots, qk_rope, caches[i % sets])

        written = 2 * HEADS[1] * ops.kv_row_bytes(HEAD_DIM, kv_dtype)
        return run, num_rows * (2 * (sum(HEADS) + HEADS[0]) * HEAD_DIM + 4 * HEAD_DIM + written)

    types = {"bf16": torch.bfloat16, **ops.QUANTIZED_KV_DTYPES}
    return {f"rope + write_kv, {name}": case(kv_dtype) for name, kv_dtype in types.items()}


def microseconds(run: Run, num_launches: int) -> float:
    """The time of one launch: the median of replays of a graph of them."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_launches):
            run(index)
    times = []
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / num_launches)
    return median(times[1:])


def main() -> None:
    """Print a line per op and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,32,64,4096,8192", help="numbers of rows, with commas")
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--intermediate-size", type=int, default=14336)
    parser.add_argument("--vocab-size", type=int, default=256000)
    parser.add_argument("--only", default="", help="parts of the names of cases, with commas")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    copy_rate = copy_tbps() * 1e6  # bytes per microsecond
    torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}: copy {copy_rate / 1e6:.2f} TB/s")
    for num_rows in map(int, arguments.rows.split(",")):
        found = cases(num_rows, arguments.hidden_size, arguments.intermediate_size) | rope_cases(num_rows)
        found |= logit_cases(num_rows, arguments.vocab_size)
        for name, (run, num_bytes) in found.items():
            if not any(part in name for part in wanted):
                continue
            is_small = num_rows <= LAUNCH_BOUND_ROWS
            us = microseconds(run, LAUNCHES if is_small else 8)
            share = "" if is_small else f"{100 * num_bytes / us / copy_rate:5.0f} %"
            print(f"{num_rows:6} rows  {name:36} {us:8.2f} us {share}", flush=True)


if __name__ == "__main__":
    main()
