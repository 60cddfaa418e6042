"""write_kv in plain torch."""

from __future__ import annotations

import torch


def write_kv(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See ops.write_kv."""
    written = slot_mapping >= 0
    if not bool(written.all()):
        k, v, slot_mapping = k[written], v[written], slot_mapping[written]
    num_heads, block_size, head_dim = key_cache.shape[1:]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    # Rows of the flattened cache: index_copy_ on [rows, head_dim] is one pass of memcpy-sized pieces.
    heads = torch.arange(num_heads, device=k.device)
    rows = ((block[:, None] * num_heads + heads) * block_size + offset[:, None]).view(-1)
    key_cache.view(-1, head_dim).index_copy_(0, rows, k.reshape(-1, head_dim).to(key_cache.dtype))
    value_cache.view(-1, head_dim).index_copy_(0, rows, v.reshape(-1, head_dim).to(value_cache.dtype))
