"""Random decode and verify batches over caches of every type, and an independent fp64 oracle for them.

The oracle walks token by token and row by row, and unpacks the stored bytes itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from attention_arguments import attention_arguments
from slipstream_kernels import ops

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class DecodeCase:
    """One call of ops.decode_attention; slots that no request owns hold NaN or the extreme value of their type.

    options: of the cache, the metadata and the layer, by name.
    """

    q: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    options: dict = field(default_factory=dict)

    def arguments(self, **changes: Any) -> tuple[Any, ...]:
        """Those of the ops by place, with some fields changed."""
        given = {
            "key": self.key_cache,
            "value": self.value_cache,
            "block_tables": self.block_tables,
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "max_query_len": self.max_query_len,
            "max_seq_len": self.block_tables.shape[1] * self.key_cache.shape[2],
            "scale": self.q.shape[2] ** -0.5,
        }
        return attention_arguments(self.q, **given | self.options | changes)

    @property
    def cache(self) -> ops.KvCache:
        return self.arguments()[1]

    def to(self, device: torch.device) -> DecodeCase:
        """The same case on a device."""
        moved = {
            name: getattr(self, name).to(device)
            for name in ("q", "key_cache", "value_cache", "block_tables", "query_start_loc", "seq_lens")
        }
        options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.options.items()}
        return replace(self, **moved, options=options)


def make_case(
    query_lens: list[int],
    seq_lens: list[int],
    geometry: tuple[int, int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> DecodeCase:
    """geometry: num_q_heads, num_kv_heads, head_dim, block_size.  kv_dtype None: dtype."""
    generator = torch.Generator().manual_seed(seed)
    num_q_heads, num_kv_heads, head_dim, block_size = geometry
    blocks_of = [-(-length // block_size) for length in seq_lens]
    order = torch.randperm(sum(blocks_of) + 3, generator=generator).tolist()
    block_tables = torch.full((len(seq_lens), max([*blocks_of, 1]) + 1), -1, dtype=torch.int32)
    owned = torch.zeros(len(order), block_size, dtype=torch.bool)
    for request, (length, count) in enumerate(zip(seq_lens, blocks_of)):
        blocks = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        block_tables[request, :count] = blocks
        for position in range(length):
            owned[blocks[position // block_size], position % block_size] = True
    shape = (owned.shape[0], num_kv_heads, block_size, head_dim)
    (key_cache, key_scale), (value_cache, value_scale) = (
        _random_cache(shape, kv_dtype or dtype, owned, generator) for _ in range(2)
    )
    options = {} if key_scale is None else {"key_scale": key_scale, "value_scale": value_scale}
    return DecodeCase(
        q=torch.randn(sum(query_lens), num_q_heads, head_dim, generator=generator).to(dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        max_query_len=max(query_lens),
        options=options,
    )


def _random_cache(
    shape: tuple[int, ...], dtype: torch.dtype, owned: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    hidden = ~owned[:, None, :, None].expand(shape)
    if dtype in (torch.int8, torch.uint8):
        width = shape[3] if dtype == torch.int8 else shape[3] // 2
        low, high = (-127, 128) if dtype == torch.int8 else (0, 256)
        cache = torch.randint(low, high, (*shape[:3], width), generator=generator).to(dtype)
        scale = (0.2 + torch.rand(shape[:3], generator=generator)) * (1.7 / 127 if dtype == torch.int8 else 1.7 / 7)
        if dtype == torch.uint8:  # int4
            scale *= torch.randint(0, 2, shape[:3], generator=generator) * 2 - 1
        return cache, scale.masked_fill(~owned[:, None].expand(shape[:3]), float("nan"))
    values = torch.randn(shape, generator=generator)
    if dtype == FP8:
        cache = values.to(FP8).view(torch.uint8).masked_fill(hidden, 0x7F).view(FP8)
        return cache, 0.5 + torch.rand(shape[1], generator=generator)
    return values.masked_fill(hidden, float("nan")).to(dtype), None


def chain_or_tree(case: DecodeCase, seed: int = 0) -> DecodeCase:
    """The case with a random draft tree per request: parents precede children, a row sees its ancestors and itself."""
    generator = torch.Generator().manual_seed(seed)
    starts, masks, positions = case.query_start_loc.tolist(), [], []
    for request, seq_len in enumerate(case.seq_lens.tolist()):
        query_len = starts[request + 1] - starts[request]
        own: list[tuple[int, int]] = []
        for row in range(query_len):
            parent = int(torch.randint(-1, row, (1,), generator=generator)) if row else -1
            mask, depth = (own[parent][0], own[parent][1] + 1) if parent >= 0 else (0, 0)
            own.append((mask | 1 << row, depth))
        masks += [mask - (1 << 64) if mask >> 63 else mask for mask, _ in own]
        positions += [seq_len - query_len + depth for _, depth in own]
    extra = {"tree_mask": torch.tensor(masks), "positions": torch.tensor(positions)}
    return replace(case, options={**case.options, **extra})


def oracle(case: DecodeCase) -> torch.Tensor:
    """[num_tokens, num_q_heads, head_dim] fp64, on the CPU."""
    case = case.to(torch.device("cpu"))
    starts, out = case.query_start_loc.tolist(), torch.zeros(case.q.shape, dtype=torch.float64)
    for request, seq_len in enumerate(case.seq_lens.tolist()):
        k, v = (_stored_rows(case, name, request, seq_len) for name in ("key", "value"))
        prefix = seq_len - (starts[request + 1] - starts[request])
        for row in range(starts[request], starts[request + 1]):
            if seq_len > 0:
                out[row] = _attend_row(case, row, row - starts[request], prefix, k, v)
    return out


def _stored_rows(case: DecodeCase, name: str, request: int, seq_len: int) -> torch.Tensor:
    """[seq_len, num_kv_heads, head_dim] fp64."""
    cache, scale = getattr(case, f"{name}_cache"), case.options.get(f"{name}_scale")
    block_size, rows = cache.shape[2], []
    for position in range(seq_len):
        block, offset = int(case.block_tables[request, position // block_size]), position % block_size
        stored = cache[block, :, offset]
        if cache.dtype == torch.uint8:
            row = torch.empty(stored.shape[0], case.q.shape[2], dtype=torch.float64)
            row[:, 0::2], row[:, 1::2] = (stored % 16).double() - 8, (stored // 16).double() - 8
        else:
            row = stored.float().double()
        if scale is not None:
            row = row * (scale[block, :, offset] if scale.dim() == 3 else scale).double()[:, None]
        rows.append(row)
    return torch.stack(rows) if rows else torch.empty(0)


def _attend_row(case: DecodeCase, row: int, index: int, prefix: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    options, start = case.options, row - index
    tree, positions = options.get("tree_mask"), options.get("positions")
    window, slopes, cap = (options.get(name) for name in ("sliding_window", "alibi_slopes", "soft_cap"))
    position_of = [p if p < prefix or positions is None else int(positions[start + p - prefix]) for p in range(len(k))]
    own = position_of[prefix + index]
    seen = [
        p
        for p in range(len(k))
        if p < prefix or (p <= prefix + index if tree is None else int(tree[row]) >> (p - prefix) & 1)
    ]
    seen = [p for p in seen if window is None or own - position_of[p] < window]
    group, out = case.q.shape[1] // k.shape[1], torch.zeros(case.q.shape[1:], dtype=torch.float64)
    distance = torch.tensor([position_of[p] - own for p in seen], dtype=torch.float64)
    for head in range(case.q.shape[1]):
        scores = k[seen, head // group] @ case.q[row, head].double() / math.sqrt(case.q.shape[2])
        scores = cap * torch.tanh(scores / cap) if cap is not None else scores
        scores = scores + slopes[head].double() * distance if slopes is not None else scores
        if options.get("sinks") is not None:
            scores = torch.cat([scores, options["sinks"][head].double()[None]])
        out[head] = torch.softmax(scores, dim=0)[: len(seen)] @ v[seen, head // group]
    return out
