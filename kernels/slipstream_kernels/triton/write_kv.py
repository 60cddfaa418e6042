"""write_kv in Triton-lang: one program copies all heads of a few tokens to their slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Elements of k a program holds, as many of v: enough bytes in flight to fill memory without large tiles.
TILE_ELEMENTS = 4096
NUM_WARPS = 4


@triton.jit
def _write_kv_kernel(
    k_ptr,
    v_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    num_tokens,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    rows = tl.arange(0, TOKENS * HEADS_PADDED)
    tokens, heads = tl.program_id(0).to(tl.int64) * TOKENS + rows // HEADS_PADDED, rows % HEADS_PADDED
    dims = tl.arange(0, DIM_PADDED)[None, :]
    is_row = (tokens < num_tokens) & (heads < NUM_HEADS)
    # k and v do not wait for the slots.
    mask = is_row[:, None] & (dims < HEAD_DIM)
    k = tl.load(k_ptr + (tokens * k_token_stride + heads * k_head_stride)[:, None] + dims, mask=mask)
    v = tl.load(v_ptr + (tokens * v_token_stride + heads * v_head_stride)[:, None] + dims, mask=mask)
    slots = tl.load(slot_mapping_ptr + tokens, mask=is_row, other=-1)
    cache_rows = ((slots // BLOCK_SIZE) * NUM_HEADS + heads) * BLOCK_SIZE + slots % BLOCK_SIZE
    offsets = (cache_rows * HEAD_DIM)[:, None] + dims
    mask = mask & (slots >= 0)[:, None]
    tl.store(key_cache_ptr + offsets, k.to(key_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(value_cache_ptr + offsets, v.to(value_cache_ptr.dtype.element_ty), mask=mask)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See ops.write_kv."""
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    heads_padded, dim_padded = triton.next_power_of_2(num_heads), triton.next_power_of_2(head_dim)
    tokens = max(1, TILE_ELEMENTS // (heads_padded * dim_padded))
    _write_kv_kernel[(triton.cdiv(num_tokens, tokens),)](
        k,
        v,
        key_cache,
        value_cache,
        slot_mapping,
        num_tokens,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        NUM_HEADS=num_heads,
        BLOCK_SIZE=key_cache.shape[2],
        HEAD_DIM=head_dim,
        TOKENS=tokens,
        HEADS_PADDED=heads_padded,
        DIM_PADDED=dim_padded,
        num_warps=NUM_WARPS,
    )
