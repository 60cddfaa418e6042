"""Times prefill attention on a GPU: TFLOP/s with a cold L2, beside the Triton-lang kernel and torch's own attention.

`python -m slipstream_kernels.bench_prefill`.  Random data; causal work only is counted; `contiguous` is the same with
the blocks of each request in order.  After the library's: the same prompts over quantised caches, staging included;
`keys in fp8` lets queries be rounded, `all in fp8` probabilities (and keys and values of a bf16 cache), too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from slipstream_kernels.attention.attention_call import AttentionMetadata, AttentionOptions
from slipstream_kernels.attention.cuda.prefill_attention import KV_TYPES, has_whole_rows
from slipstream_kernels.attention.paged_attention import paged_attention
from slipstream_kernels.bench import median_seconds
from slipstream_kernels.kv_cache import QUANTIZED_KV_DTYPES, TOKEN_SCALED_DTYPES, KvCache, empty_kv_cache

BLOCK_SIZE = 64
REPEATS = 10
LIBRARY = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Shape:
    """`batch` prompts, or chunks of query_len after a prefix, of seq_len tokens in all."""

    query_len: int
    seq_len: int
    batch: int = 1
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    def name(self) -> str:
        """Short text for tables."""
        prefix = self.seq_len - self.query_len
        after = f" after {prefix}" if prefix else ""
        return f"{self.num_q_heads}/{self.num_kv_heads}x{self.head_dim} {self.batch} x {self.query_len}{after}"

    def flops(self) -> float:
        """FLOPs of the pairs of query and key that a causal mask leaves."""
        prefix = self.seq_len - self.query_len
        pairs = self.query_len * prefix + self.query_len * (self.query_len + 1) / 2
        return 4.0 * self.batch * self.num_q_heads * self.head_dim * pairs


SHAPES = (
    [Shape(length, length) for length in (1024, 2048, 4096, 8192, 16384, 32768)]
    + [Shape(2048, 2048, batch=8), Shape(2048, 8192), Shape(2048, 32768), Shape(8192, 65536)]
    + [Shape(8192, 8192, num_q_heads=40, num_kv_heads=40), Shape(8192, 8192, head_dim=64)]
    + [Shape(8192, 8192, num_q_heads=32, num_kv_heads=32, head_dim=dim) for dim in (80, 96)]
    + [Shape(*of, num_q_heads=16, num_kv_heads=8, head_dim=256) for of in ((1024, 1024), (8192, 8192), (2048, 32768))]
)


@dataclass(frozen=True)
class Result:
    """us: time of one call; tflops: the shape's work over it."""

    shape: str
    version: str
    us: float
    tflops: float


def random_cache(shape: Shape, kv_dtype: torch.dtype) -> KvCache:
    """A cache with all blocks of the shape's requests.  Integers are all their codes, scaled to about unit variance."""
    num_blocks = shape.batch * -(-shape.seq_len // BLOCK_SIZE)
    dims = (num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    cache = empty_kv_cache(dims, kv_dtype, torch.device("cuda"))
    for tensor, scale in ((cache.key, cache.key_scale), (cache.value, cache.value_scale)):
        if kv_dtype in TOKEN_SCALED_DTYPES:
            tensor.view(torch.uint8).random_(0, 256)
            assert scale is not None
            scale.fill_(1 / 74 if kv_dtype == torch.int8 else 1 / 4.6)
        else:
            tensor.copy_(torch.randn(dims, dtype=torch.bfloat16, device="cuda"))
    return cache


def paged_call(
    shape: Shape,
    backend: str,
    is_shuffled: bool = True,
    kv_dtype: torch.dtype = torch.bfloat16,
    rounds: tuple[str, ...] = (),
) -> Callable[[], torch.Tensor]:
    """A call of ops.paged_attention over a cache of its own.  rounds: of fp8_queries, fp8_probs and key_mean."""
    cache = random_cache(shape, kv_dtype)
    num_blocks = cache.key.shape[0]
    order = torch.randperm(num_blocks, device="cuda") if is_shuffled else torch.arange(num_blocks, device="cuda")
    num_tokens = shape.batch * shape.query_len
    q = torch.randn(num_tokens, shape.num_q_heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
    starts = torch.arange(0, num_tokens + 1, shape.query_len, dtype=torch.int32, device="cuda")
    lengths = torch.full((shape.batch,), shape.seq_len, dtype=torch.int32, device="cuda")
    metadata = AttentionMetadata(order.int().view(shape.batch, -1), starts, lengths, shape.query_len, shape.seq_len)
    options = AttentionOptions(
        shape.head_dim**-0.5,
        fp8_queries="fp8_queries" in rounds,
        fp8_probs="fp8_probs" in rounds,
        key_mean=torch.zeros(shape.num_kv_heads, shape.head_dim, device="cuda") if "key_mean" in rounds else None,
    )

    def run() -> torch.Tensor:
        return paged_attention(q, cache, metadata, options, backend=backend)

    return run


def library_call(shape: Shape, backend: SDPBackend) -> Callable[[], torch.Tensor]:
    """torch's attention of whole prompts, keys and values repeated for each query head beforehand."""
    dims = (shape.batch, shape.num_q_heads, shape.seq_len, shape.head_dim)
    q, k, v = (torch.randn(dims, dtype=torch.bfloat16, device="cuda") for _ in range(3))

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return run


def calls(shape: Shape) -> dict[str, Callable[[], torch.Tensor]]:
    """Everything that computes this shape, by name."""
    versions = {
        "cuda": paged_call(shape, "cuda"),
        "cuda contiguous": paged_call(shape, "cuda", is_shuffled=False),
        "triton": paged_call(shape, "triton"),
    }
    if shape.query_len == shape.seq_len:
        versions.update({name: library_call(shape, backend) for name, backend in LIBRARY.items()})
    for name, kv_dtype in QUANTIZED_KV_DTYPES.items():
        if has_whole_rows(KV_TYPES[kv_dtype], shape.head_dim):
            versions[name] = paged_call(shape, "cuda", kv_dtype=kv_dtype)
    for name, rounds in (("keys in fp8", ("fp8_queries",)), ("all in fp8", ("fp8_queries", "fp8_probs"))):
        versions[f"fp8_e4m3, {name}"] = paged_call(shape, "cuda", kv_dtype=torch.float8_e4m3fn, rounds=rounds)
    versions["bf16, all in fp8"] = paged_call(shape, "cuda", rounds=("key_mean",))
    return versions


def main() -> None:
    """Print the table; see the module's text."""
    parser = argparse.ArgumentParser(description="Time prefill attention")
    parser.add_argument("--only", default="", help="run the shapes whose name contains this")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    device, results = torch.device("cuda"), []
    for shape in SHAPES:
        if arguments.only not in shape.name():
            continue
        cells = []
        for version, run in calls(shape).items():
            seconds = median_seconds(run, device, REPEATS)
            results.append(Result(shape.name(), version, seconds * 1e6, shape.flops() / seconds / 1e12))
            cells.append(f"{version} {results[-1].tflops:.0f}")
        print(f"{shape.name():26}", " · ".join(cells), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
