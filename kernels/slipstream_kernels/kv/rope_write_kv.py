"""rope_write_kv: contract and choice.  Rotates q and k and writes k and v to the cache."""

from __future__ import annotations

import torch

from slipstream_kernels.kv_cache import KvCache, check_kv_cache
from slipstream_kernels.rotation import HeadNorms, QKRope, Rope
from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select
from slipstream_kernels.token_slots import TokenSlots, check_slots


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: TokenSlots,
    qk_rope: QKRope,
    cache: KvCache,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Normalise (optional) and rotate q and k; store k and v in the cache's type at their slots.  One launch.

    q: [num_tokens, num_q_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]; last dimension contiguous, may
    be views of a fused qkv; not changed.
    Cache formats: kv_cache.py; fp8 saturates at 448 * scale, int8 and int4 are rounded to nearest, in steps of 1/127
    and 1/8 of the absmax of each token's head.
    Computed in fp32; normalised and rotated heads are rounded to q's dtype, after each of both, then stored.
    Returns the queries, [num_tokens, num_q_heads, head_dim] contiguous, dtype of q (q itself without rope and norms).
    """
    _check_heads(q, k, v)
    check_slots(slots, q.shape[0])
    _check_rope(q, qk_rope.rope, qk_rope.norms)
    check_kv_cache(cache, k.shape[1], k.shape[2], q.dtype)
    return select("kv.rope_write_kv", backend, q).rope_write_kv(q, k, v, slots, qk_rope, cache)


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    require_float("q", q)
    if q.dim() != 3:
        raise ValueError(f"q: shape {tuple(q.shape)}, expected [num_tokens, num_q_heads, head_dim]")
    if k.dim() != 3 or (k.shape[0], k.shape[2]) != (q.shape[0], q.shape[2]) or k.dtype != q.dtype:
        raise ValueError(
            f"k: {k.dtype} {tuple(k.shape)}, expected {q.dtype} [{q.shape[0]}, num_kv_heads, {q.shape[2]}]"
        )
    require_shape("v", v, tuple(k.shape))
    if v.dtype != q.dtype:
        raise ValueError(f"v: dtype {v.dtype}, expected q's {q.dtype}")
    for name, heads in (("q", q), ("k", k), ("v", v)):
        require_unit_stride(name, heads)


def _check_rope(q: torch.Tensor, rope: Rope | None, norms: HeadNorms | None) -> None:
    head_dim = q.shape[2]
    if rope is not None:
        cos_sin = rope.cos_sin
        if cos_sin.dim() != 2 or cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
            found = f"{cos_sin.dtype} {tuple(cos_sin.shape)}"
            raise ValueError(f"cos_sin: {found}, expected contiguous float32 [max_pos, rotary_dim]")
        if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= head_dim:
            raise ValueError(f"rotary_dim: {rope.rotary_dim}, expected an even number in 2..{head_dim}")
    if norms is not None:
        for name, weight in (("norms.q", norms.q), ("norms.k", norms.k)):
            require_shape(name, weight, (head_dim,))
            require_unit_stride(name, weight)
