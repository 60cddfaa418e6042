"""rope: contract and choice.  Rotary position embedding, in place, on queries and keys together."""

from __future__ import annotations

import torch

from slipstream_kernels.ops.select import require_float, require_shape, require_unit_stride, select


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    rotary_dim: int,
    interleaved: bool = False,
    backend: str = "auto",
) -> None:
    """Rotate the first rotary_dim elements of every head of q and k by its token's position, in place.

    q: [num_tokens, num_q_heads, head_dim]; k: [num_tokens, num_kv_heads, head_dim]; views with a contiguous last
    dimension.
    positions: [num_tokens] int64 or int32, each < max_pos.  cos_sin_cache: [max_pos, rotary_dim] fp32, cos half then
    sin half. Pairs are (i, i + rotary_dim/2) (GPT-NeoX, Llama), or (2i, 2i+1) if interleaved (GPT-J, ChatGLM).
    Computed in fp32.
    Source: RoFormer, arXiv:2104.09864.
    """
    require_float("q", q)
    if q.dim() != 3:
        raise ValueError(f"q: shape {tuple(q.shape)}, expected [num_tokens, num_q_heads, head_dim]")
    if k.dim() != 3 or (k.shape[0], k.shape[2]) != (q.shape[0], q.shape[2]) or k.dtype != q.dtype:
        raise ValueError(
            f"k: {k.dtype} {tuple(k.shape)}, expected {q.dtype} [{q.shape[0]}, num_kv_heads, {q.shape[2]}]"
        )
    require_unit_stride("q", q)
    require_unit_stride("k", k)
    require_shape("positions", positions, (q.shape[0],))
    if rotary_dim % 2 or not 0 < rotary_dim <= q.shape[2]:
        raise ValueError(f"rotary_dim: {rotary_dim}, expected an even number in 2..{q.shape[2]}")
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] != rotary_dim or cos_sin_cache.dtype != torch.float32:
        raise ValueError(
            f"cos_sin_cache: {cos_sin_cache.dtype} {tuple(cos_sin_cache.shape)}, "
            f"expected float32 [max_pos, {rotary_dim}]"
        )
    if not cos_sin_cache.is_contiguous():
        raise ValueError("cos_sin_cache: must be contiguous")
    select("rope", backend, q).rope(q, k, positions, cos_sin_cache, rotary_dim, interleaved)
