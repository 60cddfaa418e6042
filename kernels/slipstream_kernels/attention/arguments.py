"""What the attention ops ask of their arguments alike."""

from __future__ import annotations

import torch

from slipstream_kernels.kv_cache import KvCache, check_kv_cache
from slipstream_kernels.select import require_float, require_shape, require_unit_stride


def check_tensors(
    q: torch.Tensor,
    cache: KvCache,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Raise ValueError, naming the tensor, unless shapes and types are those of ops.paged_attention."""
    require_float("q", q)
    if q.dim() != 3:
        raise ValueError(f"q: shape {tuple(q.shape)}, expected [num_tokens, num_q_heads, head_dim]")
    require_unit_stride("q", q)
    if cache.key.dim() != 4 or q.shape[1] % cache.key.shape[1]:
        raise ValueError(
            f"key_cache: shape {tuple(cache.key.shape)}, expected [num_blocks, num_kv_heads, block_size, head_dim] "
            f"with kv heads that divide q's {q.shape[1]}"
        )
    check_requests(block_tables, query_start_loc, seq_lens)
    check_kv_cache(cache, cache.key.shape[1], q.shape[2], q.dtype)


def check_requests(block_tables: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Raise ValueError, naming the tensor, unless they describe the requests of one step."""
    if seq_lens.dim() != 1 or seq_lens.dtype != torch.int32:
        raise ValueError(f"seq_lens: {seq_lens.dtype} {tuple(seq_lens.shape)}, expected int32 [num_requests]")
    require_shape("query_start_loc", query_start_loc, (seq_lens.shape[0] + 1,))
    if query_start_loc.dtype != torch.int32:
        raise ValueError(f"query_start_loc: dtype {query_start_loc.dtype}, expected int32")
    if block_tables.dim() != 2 or block_tables.shape[0] != seq_lens.shape[0] or block_tables.dtype != torch.int32:
        raise ValueError(
            f"block_tables: {block_tables.dtype} {tuple(block_tables.shape)}, "
            f"expected int32 [{seq_lens.shape[0]}, max_blocks]"
        )
    require_unit_stride("block_tables", block_tables)


def check_options(
    q: torch.Tensor,
    sliding_window: int | None,
    alibi_slopes: torch.Tensor | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Raise ValueError, naming the option, for a value that no attention has."""
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window: {sliding_window}, expected at least 1, or None")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap: {soft_cap}, expected more than 0, or None")
    for name, of_heads in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if of_heads is not None:
            require_shape(name, of_heads, (q.shape[1],))
            if of_heads.dtype != torch.float32:
                raise ValueError(f"{name}: dtype {of_heads.dtype}, expected float32")
    if out is not None:
        require_shape("out", out, tuple(q.shape))
        if out.dtype != q.dtype or not out.is_contiguous():
            raise ValueError(f"out: must be contiguous and {q.dtype}")
