"""Times decode attention on a GPU: TB/s of KV read with a cold L2, beside the copy rate of the same run.

`python -m slipstream_kernels.bench_decode`.  A CUDA graph launches over caches several times larger than the L2, as a
model's layers do; random data; scales count as bytes read.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from statistics import median

import torch

from slipstream_kernels.attention.attention_call import AttentionMetadata, AttentionOptions
from slipstream_kernels.attention.decode_attention import decode_attention
from slipstream_kernels.kv_cache import FP8_DTYPE, INT4_DTYPE, INT8_DTYPE, TOKEN_SCALED_DTYPES, KvCache

BLOCK_SIZE = 64
COLD_BYTES = 512 << 20
LAUNCHES = 24
REPLAYS = 7
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": FP8_DTYPE, "int8": INT8_DTYPE, "int4": INT4_DTYPE}


@dataclass(frozen=True)
class Shape:
    """One case: seq_len tokens per request, or uneven lengths from 1 to 2 * seq_len; behind them requests without any,
    which pad a CUDA graph."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    kv: str
    batch: int
    seq_len: int
    query_len: int = 1
    tree: bool = False
    uneven: bool = False
    num_padding: int = 0

    def name(self) -> str:
        """Short text for tables."""
        extra = f" q{self.query_len}" if self.query_len > 1 else ""
        extra += " tree" * self.tree + " uneven" * self.uneven
        extra += f" +{self.num_padding}" if self.num_padding else ""
        return f"{self.kv} {self.num_q_heads}/{self.num_kv_heads}x{self.head_dim} B{self.batch}x{self.seq_len}{extra}"


SHAPES = (
    [Shape(*heads, 128, kv, 128, 2048) for heads in ((64, 8), (32, 8), (40, 40)) for kv in KV_DTYPES]
    + [Shape(32, 8, 128, kv, 32, 1024) for kv in KV_DTYPES]
    + [Shape(40, 40, 128, kv, 32, 1024) for kv in ("bf16", "fp8")]
    + [Shape(32, 8, 128, kv, 1, 131072) for kv in KV_DTYPES]
    + [Shape(32, 8, 128, kv, 1, 1024) for kv in ("bf16", "fp8")]
    + [Shape(32, 8, 128, "fp8", 128, 2048, uneven=True)]
    + [Shape(32, 8, 128, kv, 1, 8192, 64, tree=True) for kv in ("bf16", "fp8")]
    + [Shape(32, 8, 128, "fp8", 32, 2048, 5)]
    + [Shape(32, 8, 128, "bf16", batch, 1024, rows, tree=True) for batch, rows in ((1, 8), (1, 64), (4, 16), (64, 4))]
    + [Shape(32, 8, dim, kv, 128, 2048) for dim in (64, 80, 96, 256) for kv in ("bf16", "fp8")]
)
# Groups of 4, 5, 7 and 8 query heads a KV head, batches that no tile divides, short and long contexts.
GRID = [
    Shape(*heads, 128, kv, batch, seq_len)
    for heads in ((32, 8), (40, 8), (28, 4), (64, 8))
    for kv in ("bf16", "fp8")
    for batch, seq_len in ((5, 8192), (48, 3000), (64, 8192), (128, 2048), (200, 3000), (256, 1024))
] + [
    Shape(*heads, 128, kv, batch, seq_len, num_padding=padding)
    for heads in ((32, 8), (28, 4))
    for kv in ("bf16", "fp8")
    for batch, seq_len, padding in ((5, 1024, 3), (40, 1024, 88), (100, 1024, 12), (200, 3000, 24))
]


@dataclass(frozen=True)
class Result:
    """us: time of one launch; tbps: K and V bytes, with scales, over it."""

    name: str
    us: float
    tbps: float
    share_of_copy: float


def copy_tbps() -> float:
    """Device-to-device copy, bytes read plus bytes written."""
    source = torch.randint(-128, 127, (4 << 30,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source), 4) / 1e12


def _random_cache(shape: Shape, num_blocks: int) -> KvCache:
    (key, key_scale), (value, value_scale) = (_random_rows(shape, num_blocks) for _ in range(2))
    return KvCache(key, value, key_scale, value_scale)


def _random_rows(shape: Shape, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    dims = (num_blocks, shape.num_kv_heads, BLOCK_SIZE)
    dtype = KV_DTYPES[shape.kv]
    if dtype in TOKEN_SCALED_DTYPES:
        width = shape.head_dim if dtype == INT8_DTYPE else shape.head_dim // 2
        raw = torch.randint(0, 256, (*dims, width), dtype=torch.uint8, device="cuda")
        return raw.view(dtype), torch.rand(dims, device="cuda") * (0.03 if dtype == INT8_DTYPE else 0.3)
    return torch.randn((*dims, shape.head_dim), dtype=torch.bfloat16, device="cuda").to(dtype), None


def _lengths(shape: Shape) -> torch.Tensor:
    lengths = torch.full((shape.batch,), shape.seq_len)
    if shape.uneven:
        lengths = torch.randint(1, 2 * shape.seq_len, (shape.batch,), generator=torch.Generator().manual_seed(0))
    return torch.cat([lengths, torch.zeros(shape.num_padding, dtype=torch.int64)]).int()


def _tree_mask(shape: Shape) -> torch.Tensor | None:
    """A tree per request: each row's parent is the row at half its index."""
    if not shape.tree:
        return None
    masks = [1]
    for row in range(1, shape.query_len):
        masks.append(masks[row // 2 if row > 1 else 0] | 1 << row)
    words = torch.tensor([mask - (1 << 64) if mask >> 63 else mask for mask in masks])
    return words.repeat(shape.batch).cuda()


def run(shape: Shape, copy_rate: float) -> Result:
    """Time one shape."""
    lengths = _lengths(shape)
    blocks_of = (lengths + BLOCK_SIZE - 1) // BLOCK_SIZE
    num_blocks = int(blocks_of.sum())
    order = torch.randperm(num_blocks).int()
    tables = torch.full((len(lengths), int(blocks_of.max())), -1, dtype=torch.int32)
    for request, first in enumerate((blocks_of.cumsum(0) - blocks_of).tolist()):
        tables[request, : int(blocks_of[request])] = order[first : first + int(blocks_of[request])]
    bits = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4}[shape.kv]
    scale_bytes = 4 if KV_DTYPES[shape.kv] in TOKEN_SCALED_DTYPES else 0
    num_bytes = 2 * int(lengths.sum()) * shape.num_kv_heads * (shape.head_dim * bits // 8 + scale_bytes)
    caches = [_random_cache(shape, num_blocks) for _ in range(min(LAUNCHES, max(2, -(-COLD_BYTES // num_bytes))))]
    q = torch.randn(len(lengths) * shape.query_len, shape.num_q_heads, shape.head_dim, device="cuda").bfloat16()
    starts = torch.arange(0, q.shape[0] + 1, shape.query_len, dtype=torch.int32, device="cuda")
    metadata = AttentionMetadata(
        tables.cuda(), starts, lengths.cuda(), shape.query_len, int(lengths.max()), _tree_mask(shape),
        is_prefix_settled=True,
    )  # fmt: skip
    options, out = AttentionOptions(shape.head_dim**-0.5), torch.empty_like(q)

    def launch_all() -> None:
        for index in range(LAUNCHES):
            decode_attention(q, caches[index % len(caches)], metadata, options, out=out, backend="cuda")

    launch_all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_all()
    seconds = _seconds(graph.replay, REPLAYS) / LAUNCHES
    tbps = num_bytes / seconds / 1e12
    return Result(shape.name(), seconds * 1e6, tbps, tbps / copy_rate)


def _seconds(work: object, repeats: int) -> float:
    assert callable(work)
    work()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return median(times)


def main() -> None:
    """Print a table; --json writes it too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--grid", action="store_true", help="groups of 4 to 8 query heads by batch and context instead")
    parser.add_argument("--only", default="", help="run the shapes whose name contains this")
    arguments = parser.parse_args()
    copy_rate = copy_tbps()
    torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}: copy {copy_rate:.2f} TB/s")
    results = []
    for shape in GRID if arguments.grid else SHAPES:
        if arguments.only in shape.name():
            result = run(shape, copy_rate)
            results.append(result)
            print(
                f"{result.name:40} {result.us:9.1f} us {result.tbps:6.2f} TB/s {100 * result.share_of_copy:5.0f} %",
                flush=True,
            )
            torch.cuda.empty_cache()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(result) for result in results], file, indent=1)


if __name__ == "__main__":
    main()
