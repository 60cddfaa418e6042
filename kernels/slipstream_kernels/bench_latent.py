"""Times latent attention on a GPU with a cold L2: TB/s of latents and TFLOP/s, CUDA beside Triton-lang.

`python -m slipstream_kernels.bench_latent [--schedules] [--fp8] [--prompts] [--json FILE]`.  Random data, scattered
blocks of 64 tokens; --fp8: of FP8 rows.
--schedules adds the CUDA version with other cuts of the keys into shares.  --prompts: un-absorbed attention instead.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from slipstream_kernels.attention.attention_call import AttentionMetadata
from slipstream_kernels.attention.cuda import latent_attention as cuda_latent
from slipstream_kernels.attention.latent_attention import latent_attention
from slipstream_kernels.attention.latent_call import LatentCall
from slipstream_kernels.attention.ragged_attention import ragged_attention
from slipstream_kernels.attention.ragged_call import RaggedKeys, RaggedMetadata
from slipstream_kernels.bench import median_seconds
from slipstream_kernels.cuda.device import count_sms
from slipstream_kernels.kv_cache import FP8_DTYPE
from slipstream_kernels.latent_cache import empty_latent_cache

RANK, ROPE_DIM, BLOCK_SIZE = 512, 64, 64
SCALE = 192**-0.5
REPEATS = 7


@dataclass(frozen=True)
class Shape:
    """`batch` requests of seq_len cached tokens, the last query_len of them queries."""

    batch: int
    seq_len: int
    num_heads: int
    query_len: int = 1

    def name(self) -> str:
        """Short text for tables."""
        rows = f" q{self.query_len}" if self.query_len > 1 else ""
        return f"{self.num_heads} heads{rows} B{self.batch} x {self.seq_len}"

    def num_tokens(self) -> int:
        """Tokens whose latents are read, each once."""
        return self.batch * self.seq_len

    def flops(self) -> int:
        """FLOPs of all pairs of query and key."""
        return 2 * self.batch * self.seq_len * self.query_len * self.num_heads * (2 * RANK + ROPE_DIM)


SHAPES = (
    Shape(128, 4096, 16),
    Shape(128, 4096, 128),
    Shape(128, 4096, 64),
    Shape(128, 4096, 16, query_len=4),
    Shape(64, 8192, 20),
    Shape(256, 8192, 16),
    Shape(256, 1024, 16),
    Shape(64, 1024, 16),
    Shape(32, 1024, 16),
    Shape(8, 8192, 16),
    Shape(1, 8192, 16),
    Shape(1, 131072, 16),
    Shape(8, 8192, 128),
    Shape(1, 1024, 128),
)


@dataclass(frozen=True)
class Prompt:
    """One request's queries over num_keys keys that lie side by side.  sizes: features of a key's own part, of the part
    that heads share, of a value.  Causal if it attends to as many keys as it has queries, else to keys before them."""

    num_queries: int
    num_keys: int
    num_heads: int
    sizes: tuple[int, int, int] = (128, 64, 128)

    def name(self) -> str:
        """Short text for tables."""
        return f"{self.num_heads} heads {self.num_queries} x {self.num_keys} {self.sizes}"

    def num_tokens(self) -> int:
        """Tokens of keys."""
        return self.num_keys

    def flops(self) -> int:
        """FLOPs of the pairs of query and key that are not masked."""
        num_pairs = self.num_queries * self.num_keys // (2 if self.is_causal() else 1)
        return 2 * num_pairs * self.num_heads * sum(self.sizes)

    def is_causal(self) -> bool:
        """Whether its keys are its own."""
        return self.num_queries == self.num_keys


PROMPTS = (
    *(Prompt(length, length, 16) for length in (1024, 2048, 8192)),
    Prompt(2048, 8192, 16),
    Prompt(8192, 8192, 128),
    Prompt(8192, 8000, 128),
    Prompt(8192, 8192, 20, (192, 64, 256)),
    Prompt(2048, 8192, 20, (192, 64, 256)),
)


@dataclass(frozen=True)
class Result:
    """us: time of one call."""

    shape: str
    version: str
    us: float
    tbs: float
    tflops: float


def random_call(shape: Shape, device: torch.device, is_fp8: bool) -> LatentCall:
    """Its cache has the blocks of all requests in random order."""
    blocks_of_request = -(-shape.seq_len // BLOCK_SIZE)
    num_blocks = shape.batch * blocks_of_request
    cache = empty_latent_cache(num_blocks, BLOCK_SIZE, RANK, ROPE_DIM, FP8_DTYPE if is_fp8 else torch.bfloat16, device)
    if is_fp8:
        cache.values.view(torch.uint8).random_(0, 0x78)  # up to 240, no NaN
        cache.scales.fill_(0.01)
        cache.rope.normal_()
    else:
        cache.rows.normal_()
    num_tokens = shape.batch * shape.query_len
    q = torch.randn(num_tokens, shape.num_heads, RANK + ROPE_DIM, dtype=torch.bfloat16, device=device)
    return LatentCall(
        q=q,
        cache=cache,
        metadata=AttentionMetadata(
            torch.randperm(num_blocks, device=device).int().view(shape.batch, -1),
            torch.arange(0, num_tokens + 1, shape.query_len, dtype=torch.int32, device=device),
            torch.full((shape.batch,), shape.seq_len, dtype=torch.int32, device=device),
            max_query_len=shape.query_len,
            max_seq_len=shape.seq_len,
            is_prefix_settled=True,
        ),
        scale=SCALE,
        out=torch.empty(num_tokens, shape.num_heads, RANK, dtype=torch.bfloat16, device=device),
    )


def through_ops(call: LatentCall, backend: str) -> Callable[[], object]:
    """The op with a backend."""
    return partial(latent_attention, call.q, call.cache, call.metadata, scale=call.scale, out=call.out, backend=backend)


def versions(call: LatentCall, has_schedules: bool) -> dict[str, Callable[[], object]]:
    """Everything that computes this call, by name."""
    found = {"cuda": through_ops(call, "cuda"), "triton": through_ops(call, "triton")}
    if has_schedules:
        chosen = cuda_latent.choose_schedule(call, count_sms(call.q.device))
        for cost, least, slack in ((0, 1, 0), (1, 2, 0), (2, 6, 0), (2, 4, 3), (2, 6, 6), (4, 8, 3)):
            schedule = replace(chosen, unit_cost=cost, min_share=least, slack=slack)
            found[f"cost {cost} least {least} slack {slack}"] = partial(cuda_latent.run, call, schedule)
        for rows in set(cuda_latent.ROWS) - {chosen.rows}:
            lanes = min(-(-cuda_latent.mean_rows(call) // rows), cuda_latent.MAX_LANES)
            shares = count_sms(call.q.device) // lanes
            schedule = replace(chosen, rows=rows, num_lanes=lanes, num_shares=shares)
            found[f"{rows} rows"] = partial(cuda_latent.run, call, schedule)
        found["merged" if chosen.is_joined else "joined"] = partial(
            cuda_latent.run, call, replace(chosen, is_joined=not chosen.is_joined)
        )
        for lanes in {1, 2, 4} - {chosen.num_lanes}:
            schedule = replace(chosen, num_lanes=lanes, num_shares=count_sms(call.q.device) // lanes)
            found[f"{lanes} lanes"] = partial(cuda_latent.run, call, schedule)
    return found


def prompt_versions(prompt: Prompt, device: torch.device) -> dict[str, Callable[[], object]]:
    """Every version of its attention; keys and values are views of one tensor, as the up-projection gives them."""
    own, shared, value = prompt.sizes
    both = torch.randn(prompt.num_keys, prompt.num_heads, own + value, dtype=torch.bfloat16, device=device)
    latents = torch.randn(prompt.num_keys, RANK + shared, dtype=torch.bfloat16, device=device)
    q = torch.randn(prompt.num_queries, prompt.num_heads, own + shared, dtype=torch.bfloat16, device=device)
    num_queries, num_keys = prompt.num_queries, prompt.num_keys
    query_starts, key_starts = (
        torch.tensor([0, count], dtype=torch.int32, device=device) for count in (num_queries, num_keys)
    )
    metadata = RaggedMetadata(query_starts, key_starts, key_starts[1:], num_queries, num_keys, prompt.is_causal())
    keys = RaggedKeys(both[..., :own], latents[:, RANK:], both[..., own:])
    call = partial(ragged_attention, q, keys, metadata, scale=SCALE)
    return {backend: partial(call, backend=backend) for backend in ("cuda", "triton")}


def main() -> None:
    """Print the table; see the module's text."""
    parser = argparse.ArgumentParser(description="Time latent attention")
    parser.add_argument("--only", default="", help="run the shapes whose name contains this")
    parser.add_argument("--schedules", action="store_true", help="time other cuts of the keys as well")
    parser.add_argument("--fp8", action="store_true", help="FP8 rows instead of bf16 ones")
    parser.add_argument("--prompts", action="store_true", help="un-absorbed attention of prompts")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    device, results = torch.device("cuda"), []
    for shape in PROMPTS if arguments.prompts else SHAPES:
        if arguments.only not in shape.name():
            continue
        cells = []
        if isinstance(shape, Prompt):
            num_bytes = shape.num_tokens() * shape.num_heads * sum(shape.sizes) * 2
            found = prompt_versions(shape, device)
        else:
            call = random_call(shape, device, arguments.fp8)
            num_bytes = shape.num_tokens() * call.rows.shape[3] * call.rows.element_size()
            found = versions(call, arguments.schedules)
        for version, run in found.items():
            seconds = median_seconds(run, device, REPEATS)
            result = Result(
                shape.name(), version, seconds * 1e6, num_bytes / seconds / 1e12, shape.flops() / seconds / 1e12
            )
            results.append(result)
            cells.append(f"{version} {result.us:.1f} us {result.tbs:.2f} TB/s {result.tflops:.0f} TFLOP/s")
        print(f"{shape.name():22}", " | ".join(cells), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
