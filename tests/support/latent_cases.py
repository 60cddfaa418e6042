"""Requests over a paged cache of latents, with the numbers that it holds: the oracle of latent attention's tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from slipstream_kernels import ops
from slipstream_kernels.kv.reference.write_latent import read_latents
from slipstream_kernels.kv_cache import FP8_DTYPE

MAX_POSITIONS = 256


@dataclass(frozen=True)
class LatentCase:
    """q: absorbed queries. latents: of each request, [seq_len, rank + rope_dim] fp64, as the cache gives them back."""

    q: torch.Tensor
    cache: ops.LatentCache
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    latents: list[torch.Tensor]
    tree_mask: torch.Tensor | None

    @property
    def query_lens(self) -> list[int]:
        return self.query_start_loc.diff().tolist()

    def arguments(self, **changes: Any) -> tuple[Any, ...]:
        """Those of the ops by place, with some of the metadata's fields changed."""
        given = {"max_query_len": max(self.query_lens), "max_seq_len": int(self.seq_lens.max())}
        given |= {"tree_mask": self.tree_mask} | changes
        tensors = self.block_tables, self.query_start_loc, self.seq_lens
        return self.q, self.cache, ops.AttentionMetadata(*tensors, **given)


def make_rope(rope_dim: int, device: torch.device) -> ops.Rope:
    angles = torch.outer(torch.arange(MAX_POSITIONS), 0.1 + torch.rand(rope_dim // 2))
    return ops.Rope(torch.cat([angles.cos(), angles.sin()], dim=-1).to(device))


def starts_of(lens: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int().to(device)


def make_latent_case(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    sizes: tuple[int, int, int, int] = (3, 128, 16, 16),
    dtype: torch.dtype = torch.float32,
    is_fp8: bool = False,
    has_tree: bool = False,
    device: torch.device,
) -> LatentCase:
    """sizes: num_heads, rank, rope_dim, block_size. Blocks of all requests are shuffled; unused slots hold NaN."""
    num_heads, rank, rope_dim, block_size = sizes
    torch.manual_seed(sum(query_lens) + sum(seq_lens))
    counts = [-(-length // block_size) for length in seq_lens]
    cache = ops.empty_latent_cache(sum(counts) + 1, block_size, rank, rope_dim, FP8_DTYPE if is_fp8 else dtype, device)
    if is_fp8:
        cache.rows.fill_(0x7F)  # NaN in e4m3, in fp32 and in bf16
    else:
        cache.rows.fill_(float("nan"))
    order = torch.randperm(sum(counts) + 1).int()
    tables = torch.full((len(seq_lens), max(counts) + 2), -1, dtype=torch.int32)
    latents = []
    for request, (count, length) in enumerate(zip(counts, seq_lens)):
        tables[request, :count], order = order[:count], order[count:]
        slots = tables[request].long().repeat_interleave(block_size) * block_size
        slots = (slots + torch.arange(len(slots)) % block_size)[:length].to(device)
        _write(cache, torch.randn(length, rank + rope_dim).to(device, dtype), slots)
        latents.append(read_latents(cache, slots).double().cpu())
    q = torch.randn(sum(query_lens), num_heads, rank + rope_dim).to(device, dtype)
    masks = None
    if has_tree:
        rows = torch.cat([torch.arange(length) for length in query_lens])
        masks = ((torch.randint(0, 1 << 20, rows.shape) | 1) & ((1 << rows) - 1) | (1 << rows)).to(device)
    return LatentCase(
        q, cache, tables.to(device), starts_of(query_lens, device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device), latents, masks,
    )  # fmt: skip


def _write(cache: ops.LatentCache, latent: torch.Tensor, slots: torch.Tensor) -> None:
    """Store latents as they are: a norm weight of 1 and angles of 0."""
    device, dtype = latent.device, latent.dtype
    rope = ops.Rope(torch.cat([torch.ones(1, cache.rope_dim // 2), torch.zeros(1, cache.rope_dim // 2)], 1).to(device))
    q = torch.zeros(len(latent), 1, cache.rope_dim, device=device, dtype=dtype)
    weight = torch.ones(cache.rank, device=device, dtype=dtype)
    latents = ops.StepLatents(latent, ops.TokenSlots(torch.zeros_like(slots), slots), rope, weight, 1e-6)
    ops.write_latent(q, latents, cache, q.clone(), backend="reference")


def dense_latent_attention(case: LatentCase, scale: float) -> torch.Tensor:
    """In fp64, on the host."""
    starts, found = case.query_start_loc.tolist(), []
    for request, latents in enumerate(case.latents):
        q = case.q[starts[request] : starts[request + 1]].double().cpu()
        if not len(latents):
            found.append(torch.zeros_like(q)[..., : case.cache.rank])
            continue
        rows, prefix = torch.arange(len(q)), len(latents) - len(q)
        seen = torch.arange(len(latents)) <= prefix + rows[:, None]
        if case.tree_mask is not None:
            masks = case.tree_mask[starts[request] : starts[request + 1]].cpu()
            seen[:, prefix:] = (masks[:, None] >> rows) & 1 == 1
        scores = torch.einsum("qhd,kd->qhk", q, latents) * scale
        probs = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        found.append(torch.einsum("qhk,kd->qhd", probs, latents[:, : case.cache.rank]))
    return torch.cat(found)
