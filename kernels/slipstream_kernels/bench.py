"""Time every op: microseconds, GB/s or TFLOP/s, and the fraction of this machine's copy or matmul rate.

    python -m slipstream_kernels.bench [--device cpu] [--backend triton] [--only decode] [--json out.json]

On a GPU a read of a large buffer leaves the L2 cache cold and clean before each run; times are from CUDA events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from slipstream_kernels import ops

FLUSH_BYTES = 1 << 30


@dataclass(frozen=True)
class Shapes:
    """Sizes of one run: an 8B Llama on a GPU, a small model on a CPU."""

    num_tokens: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_requests: int
    context_len: int
    prompt_len: int


GPU_SHAPES = Shapes(8192, 32, 8, 128, 4096, 14336, 128256, 64, 2048, 8192)
CPU_SHAPES = Shapes(256, 6, 2, 64, 384, 1024, 16384, 64, 300, 256)


@dataclass(frozen=True)
class Case:
    """One op on one shape: its minimum of bytes moved or flops, and how to run it."""

    name: str
    shape: str
    run: Callable[[], object]
    num_bytes: float = 0
    num_flops: float = 0


@dataclass(frozen=True)
class Result:
    """Median time of one case; rate in GB/s or TFLOP/s, fraction of the copy or matmul rate of the same run."""

    name: str
    shape: str
    time_us: float
    rate: float
    unit: str
    share: float


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median over `repeats` runs after three to warm up, with a cold L2 on a GPU."""
    for _ in range(3):
        run()
    if device.type != "cuda":
        return statistics.median(_timed_on_cpu(run) for _ in range(repeats))
    flush = torch.ones(FLUSH_BYTES // 4, device=device)
    return statistics.median(_timed_on_gpu(run, flush) for _ in range(repeats))


def _timed_on_cpu(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _timed_on_gpu(run: Callable[[], object], flush: torch.Tensor) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # Read, not written: dirty lines would be written back during the op.  The 0.3 ms of the read also hide the launch
    # latency of the op.
    flush.sum()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def elementwise_cases(s: Shapes, dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[Case]:
    """rms_norm, silu_mul on num_tokens tokens."""
    width = torch.empty((), dtype=dtype).element_size()
    x, residual = torch.randn(2, s.num_tokens, s.hidden_size, device=device).to(dtype)
    weight = torch.ones(s.hidden_size, dtype=dtype, device=device)
    tokens = f"{s.num_tokens} tokens"
    yield Case(
        "rms_norm + residual",
        f"{tokens} x {s.hidden_size}",
        lambda: ops.rms_norm(x, weight, 1e-5, residual, backend=backend),
        num_bytes=4 * x.numel() * width,
    )
    gated = torch.randn(s.num_tokens, 2 * s.intermediate_size, device=device).to(dtype)
    yield Case(
        "silu_mul",
        f"{tokens} x {s.intermediate_size}",
        lambda: ops.silu_mul(gated, backend=backend),
        num_bytes=1.5 * gated.numel() * width,
    )


def rope_cases(s: Shapes, dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[Case]:
    """rope_write_kv of a fused qkv into a cache of each type, many tokens and few."""
    for num_tokens in (s.num_tokens, 64):
        heads = (s.num_q_heads, s.num_kv_heads, s.num_kv_heads)
        fused = torch.randn(num_tokens, sum(heads), s.head_dim, device=device).to(dtype)
        q, k, v = fused.split(heads, dim=1)
        rope = ops.Rope(torch.ones(num_tokens, s.head_dim, device=device))
        positions = torch.arange(num_tokens, device=device)
        slots, qk_rope = ops.TokenSlots(positions, positions), ops.QKRope(rope)
        for name, kv_dtype in {"plain": dtype, **ops.QUANTIZED_KV_DTYPES}.items():
            cache = ops.empty_kv_cache((num_tokens // 64 + 1, s.num_kv_heads, 64, s.head_dim), kv_dtype, device)
            run = partial(ops.rope_write_kv, q, k, v, slots, qk_rope, cache, backend=backend)
            written = 2 * k.shape[0] * k.shape[1] * ops.kv_row_bytes(s.head_dim, kv_dtype)
            num_bytes = (fused.numel() + q.numel()) * fused.element_size() + rope.cos_sin.numel() * 4 + written
            yield Case(f"rope_kv {name}", f"{num_tokens} tokens x {heads}", run, num_bytes=num_bytes)


def attention_cases(s: Shapes, dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[Case]:
    """Decode of num_requests contexts, and one prompt."""
    width, num_blocks = torch.empty((), dtype=dtype).element_size(), -(-s.context_len // 64)
    total_blocks = max(s.num_requests * num_blocks, -(-s.prompt_len // 64))
    shape = (total_blocks, s.num_kv_heads, 64, s.head_dim)
    cache = ops.KvCache(*(torch.randn(shape, device=device, dtype=dtype) for _ in range(2)))
    options = ops.AttentionOptions(s.head_dim**-0.5)
    scrambled = torch.randperm(total_blocks, device=device).int()

    def case(name: str, num_requests: int, query_len: int, seq_len: int, **work: float) -> Case:
        q = torch.randn(num_requests * query_len, s.num_q_heads, s.head_dim, device=device).to(dtype)
        tables = scrambled[: num_requests * -(-seq_len // 64)].view(num_requests, -1)
        starts = torch.arange(0, q.shape[0] + 1, query_len, dtype=torch.int32, device=device)
        seq_lens = torch.full((num_requests,), seq_len, dtype=torch.int32, device=device)
        metadata = ops.AttentionMetadata(tables, starts, seq_lens, query_len, seq_len)

        def run() -> torch.Tensor:
            return ops.paged_attention(q, cache, metadata, options, backend=backend)

        return Case(name, f"{num_requests} x {query_len} of {seq_len}", run, **work)

    num_bytes = 2.0 * s.num_kv_heads * s.head_dim * width * s.num_requests * s.context_len
    yield case("decode attention", s.num_requests, 1, s.context_len, num_bytes=num_bytes)
    yield case("decode attention", 1, 1, s.num_requests * s.context_len, num_bytes=num_bytes)
    causal_flops = 2.0 * s.prompt_len**2 * s.num_q_heads * s.head_dim
    yield case("prefill attention", 1, s.prompt_len, s.prompt_len, num_flops=causal_flops)


def sampling_cases(s: Shapes, device: torch.device, backend: str) -> Iterator[Case]:
    """sample, penalties, log-probs on num_requests rows.  Logits have the spread of a trained model's."""
    num_rows = s.num_requests
    logits = 4 * torch.randn(num_rows, s.vocab_size, device=device)
    ones = torch.ones(num_rows, device=device)
    counter = torch.arange(num_rows, device=device)
    shape, size = f"{num_rows} x {s.vocab_size}", float(logits.numel() * 4)
    top_k, top_p, min_p = (50 * ones).int(), 0.9 * ones, 0.05 * ones

    kinds = {
        "greedy": ops.SamplingMetadata(),
        "plain": ops.SamplingMetadata(ones),
        "top-k 50": ops.SamplingMetadata(ones, top_k),
        "top-p 0.9": ops.SamplingMetadata(ones, top_p=top_p),
        "all three": ops.SamplingMetadata(ones, top_k, top_p, min_p),
        "greedy rows of a graph": ops.SamplingMetadata(0 * ones, top_k, top_p, min_p),
        "plain rows of a graph": ops.SamplingMetadata(ones, 0 * top_k, ones, 0 * ones),
    }
    for name, rows in (("sample fp32", logits), ("sample bf16", logits.bfloat16())):
        for kind, metadata in kinds.items():
            run = partial(ops.sample, rows, metadata, counter, counter, backend=backend)
            yield Case(f"{name} {kind}", shape, run, num_bytes=float(rows.numel() * rows.element_size()))
    token_ids = torch.randint(s.vocab_size, (num_rows, 512), device=device)
    lens = torch.full((num_rows,), 256, dtype=torch.int32, device=device)
    yield Case(
        "apply_penalties",
        f"{shape}, 512 seen",
        lambda: ops.apply_penalties(
            logits, token_ids, lens, 2 * lens, ops.Penalties(ones, ones, ones), backend=backend
        ),
        num_bytes=2.0 * num_rows * 512 * 4,
    )
    yield Case("top_logprobs 5", shape, lambda: ops.top_logprobs(logits, 5, counter, backend=backend), size)


def measure_limits(device: torch.device, dtype: torch.dtype, repeats: int) -> tuple[float, float]:
    """Rates of this machine: bytes/s of a large copy (read + written), flop/s of a square matmul."""
    size = (1 << 30) if device.type == "cuda" else (1 << 26)
    source = torch.empty(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy_rate = 2 * size / median_seconds(lambda: target.copy_(source), device, repeats)
    side = 8192 if device.type == "cuda" else 512
    a = torch.randn(side, side, device=device).to(dtype)
    return copy_rate, 2 * side**3 / median_seconds(lambda: a @ a, device, repeats)


def run_cases(
    cases: Iterator[Case], device: torch.device, limits: tuple[float, float], repeats: int
) -> Iterator[Result]:
    """Time each case and compare it with the limits (bytes/s, flop/s)."""
    for case in cases:
        seconds = median_seconds(case.run, device, repeats)
        if case.num_flops:
            rate, limit, unit, scale = case.num_flops / seconds, limits[1], "TFLOP/s", 1e12
        else:
            rate, limit, unit, scale = case.num_bytes / seconds, limits[0], "GB/s", 1e9
        yield Result(case.name, case.shape, seconds * 1e6, rate / scale, unit, rate / limit)


def main() -> None:
    """Print the table; see the module's text."""
    parser = argparse.ArgumentParser(description="Time every op of slipstream_kernels")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--backend", default="auto", choices=ops.BACKENDS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    limits = measure_limits(device, dtype, arguments.repeats)
    print(f"{device}, {dtype}: copy {limits[0] / 1e9:.0f} GB/s, matmul {limits[1] / 1e12:.2f} TFLOP/s")
    results = []
    for cases in (
        elementwise_cases(shapes, dtype, device, arguments.backend),
        rope_cases(shapes, dtype, device, arguments.backend),
        attention_cases(shapes, dtype, device, arguments.backend),
        sampling_cases(shapes, device, arguments.backend),
    ):
        chosen = (case for case in cases if arguments.only in case.name)
        for result in run_cases(chosen, device, limits, arguments.repeats):
            results.append(result)
            numbers = f"{result.time_us:10.1f} us {result.rate:9.2f} {result.unit:8}{100 * result.share:6.1f} %"
            print(f"{result.name:22}{result.shape:32}{numbers}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
