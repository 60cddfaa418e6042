"""write_kv in Triton-lang: one program copies one token's heads to its slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write_kv_kernel(
    k_ptr,
    v_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot >= 0:
        heads = tl.arange(0, HEADS_PADDED)[:, None]
        dims = tl.arange(0, DIM_PADDED)[None, :]
        mask = (heads < NUM_HEADS) & (dims < HEAD_DIM)
        row = ((slot // BLOCK_SIZE) * NUM_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
        k = tl.load(k_ptr + token * k_token_stride + heads * k_head_stride + dims, mask=mask)
        v = tl.load(v_ptr + token * v_token_stride + heads * v_head_stride + dims, mask=mask)
        tl.store(key_cache_ptr + row * HEAD_DIM + dims, k.to(key_cache_ptr.dtype.element_ty), mask=mask)
        tl.store(value_cache_ptr + row * HEAD_DIM + dims, v.to(value_cache_ptr.dtype.element_ty), mask=mask)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See ops.write_kv."""
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    _write_kv_kernel[(num_tokens,)](
        k,
        v,
        key_cache,
        value_cache,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        NUM_HEADS=num_heads,
        BLOCK_SIZE=key_cache.shape[2],
        HEAD_DIM=head_dim,
        HEADS_PADDED=triton.next_power_of_2(num_heads),
        DIM_PADDED=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
