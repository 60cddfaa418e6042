"""An independent paged attention for tests: token by token lookup, materialised mask and softmax, fp64. Slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from attention_arguments import attention_arguments


@dataclass(frozen=True)
class PagedBatch:
    """Random inputs of one paged-attention call; slots that no request owns hold NaN."""

    q: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int

    def arguments(self, **given: Any) -> tuple[Any, ...]:
        """Those of ops.paged_attention by place; given: options and changed fields, by name."""
        own = {name: value for name, value in vars(self).items() if name not in ("q", "key_cache", "value_cache")}
        own |= {"key": self.key_cache, "value": self.value_cache, "scale": self.q.shape[-1] ** -0.5}
        return attention_arguments(self.q, **own | given)


def make_batch(
    query_lens: list[int],
    seq_lens: list[int],
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> PagedBatch:
    """A batch with blocks scattered at random over the cache, and everything unowned poisoned."""
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(blocks_of) + 3
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    key_cache = torch.full(shape, float("nan"))
    value_cache = torch.full(shape, float("nan"))
    block_tables = torch.full((len(seq_lens), max([*blocks_of, 1]) + 1), -1, dtype=torch.int32)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    for request, (length, count) in enumerate(zip(seq_lens, blocks_of)):
        blocks = [free.pop() for _ in range(count)]
        block_tables[request, :count] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(length):
            slot = blocks[position // block_size], slice(None), position % block_size
            key_cache[slot] = torch.randn(num_kv_heads, head_dim, generator=generator)
            value_cache[slot] = torch.randn(num_kv_heads, head_dim, generator=generator)
    q = torch.randn(sum(query_lens), num_q_heads, head_dim, generator=generator)
    return PagedBatch(
        q=q.to(device, dtype),
        key_cache=key_cache.to(device, dtype),
        value_cache=value_cache.to(device, dtype),
        block_tables=block_tables.to(device),
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )


def dense_attention(
    batch: PagedBatch,
    scale: float,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[num_tokens, num_q_heads, head_dim] fp64, on the CPU."""
    q, key_cache, value_cache = (x.cpu().double() for x in (batch.q, batch.key_cache, batch.value_cache))
    group, block_size = q.shape[1] // key_cache.shape[1], key_cache.shape[2]
    starts, out = batch.query_start_loc.tolist(), torch.zeros_like(q)
    for request, seq_len in enumerate(batch.seq_lens.tolist()):
        start, stop = starts[request], starts[request + 1]
        if start == stop or seq_len == 0:
            continue
        table = batch.block_tables[request].tolist()
        slots = [(table[p // block_size], p % block_size) for p in range(seq_len)]
        k = torch.stack([key_cache[block, :, offset] for block, offset in slots]).repeat_interleave(group, dim=1)
        v = torch.stack([value_cache[block, :, offset] for block, offset in slots]).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], k) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = torch.arange(seq_len - (stop - start), seq_len)[:, None] - torch.arange(seq_len)
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.cpu().double()[:, None, None] * distance
        hidden = distance < 0
        if sliding_window is not None:
            hidden |= distance >= sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.cpu().double()[:, None, None].expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, column], dim=-1)
        probs = torch.softmax(scores, dim=-1)[..., :seq_len]
        out[start:stop] = torch.einsum("hqk,khd->qhd", probs, v)
    return out
