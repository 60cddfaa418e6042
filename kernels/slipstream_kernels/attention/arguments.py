"""What the attention ops ask of their arguments alike."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.attention_call import AttentionCall, AttentionMetadata, AttentionOptions
from slipstream_kernels.kv_cache import KvCache, check_kv_cache
from slipstream_kernels.select import require_float, require_shape, require_unit_stride

MAX_QUERY_LEN = 64  # of requests that may have trees: bits of a mask word


def checked_call(
    q: torch.Tensor,
    cache: KvCache,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    out: torch.Tensor | None,
) -> AttentionCall:
    """The call, with room for its result if there is none.  Raises ValueError, naming the field, for what is wrong."""
    _check_tensors(q, cache)
    check_requests(metadata)
    check_kv_cache(cache, cache.num_kv_heads, q.shape[2], q.dtype)
    check_rows(q, metadata)
    _check_options(q, options)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    require_shape("out", out, tuple(q.shape))
    if out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out: must be contiguous and {q.dtype}")
    return AttentionCall(q, cache, metadata, options, out)


def _check_tensors(q: torch.Tensor, cache: KvCache) -> None:
    require_float("q", q)
    if q.dim() != 3:
        raise ValueError(f"q: shape {tuple(q.shape)}, expected [num_tokens, num_q_heads, head_dim]")
    require_unit_stride("q", q)
    if cache.key.dim() != 4 or q.shape[1] % cache.key.shape[1]:
        raise ValueError(
            f"cache.key: shape {tuple(cache.key.shape)}, expected [num_blocks, num_kv_heads, block_size, head_dim] "
            f"with kv heads that divide q's {q.shape[1]}"
        )


def check_requests(metadata: AttentionMetadata) -> None:
    """Raise ValueError, naming the tensor, unless they describe the requests of one step."""
    tables, starts, seq_lens = metadata.block_tables, metadata.query_start_loc, metadata.seq_lens
    if seq_lens.dim() != 1 or seq_lens.dtype != torch.int32:
        raise ValueError(f"seq_lens: {seq_lens.dtype} {tuple(seq_lens.shape)}, expected int32 [num_requests]")
    require_shape("query_start_loc", starts, (seq_lens.shape[0] + 1,))
    if starts.dtype != torch.int32:
        raise ValueError(f"query_start_loc: dtype {starts.dtype}, expected int32")
    if tables.dim() != 2 or tables.shape[0] != seq_lens.shape[0] or tables.dtype != torch.int32:
        raise ValueError(
            f"block_tables: {tables.dtype} {tuple(tables.shape)}, expected int32 [{seq_lens.shape[0]}, max_blocks]"
        )
    require_unit_stride("block_tables", tables)


def check_rows(q: torch.Tensor, metadata: AttentionMetadata) -> None:
    """Raise ValueError, naming the field, unless the rows' number and trees may be so."""
    tree_mask, positions = metadata.tree_mask, metadata.positions
    if metadata.max_query_len < 1:
        raise ValueError(f"max_query_len: {metadata.max_query_len}, expected at least 1")
    if tree_mask is None and positions is None:
        return
    if tree_mask is None:
        raise ValueError("positions: goes with tree_mask; without, a row's position is its slot")
    if metadata.max_query_len > MAX_QUERY_LEN:
        raise ValueError(f"max_query_len: {metadata.max_query_len}, expected 1 to {MAX_QUERY_LEN} with tree_mask")
    for name, rows in (("tree_mask", tree_mask), ("positions", positions)):
        if rows is not None:
            require_shape(name, rows, (q.shape[0],))
            if rows.dtype != torch.int64 or not rows.is_contiguous():
                raise ValueError(f"{name}: must be contiguous int64, is {rows.dtype}")


def check_positions(metadata: AttentionMetadata) -> None:
    """Raise ValueError unless the rows of a tree have positions."""
    if metadata.tree_mask is not None and metadata.positions is None:
        raise ValueError("positions: goes with tree_mask; without, a row's position is its slot")


def _check_options(q: torch.Tensor, options: AttentionOptions) -> None:
    """Raise ValueError, naming the option, for a value that no attention has."""
    if options.sliding_window is not None and options.sliding_window < 1:
        raise ValueError(f"sliding_window: {options.sliding_window}, expected at least 1, or None")
    if options.soft_cap is not None and options.soft_cap <= 0:
        raise ValueError(f"soft_cap: {options.soft_cap}, expected more than 0, or None")
    for name, of_heads in (("alibi_slopes", options.alibi_slopes), ("sinks", options.sinks)):
        if of_heads is not None:
            require_shape(name, of_heads, (q.shape[1],))
            if of_heads.dtype != torch.float32:
                raise ValueError(f"{name}: dtype {of_heads.dtype}, expected float32")
