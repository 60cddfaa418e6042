"""rope_write_kv in plain torch."""

from __future__ import annotations

import torch

from slipstream_kernels.kv.reference.quantized_kv import LARGEST, quantize_rows
from slipstream_kernels.kv_cache import FP8_DTYPE, TOKEN_SCALED_DTYPES, KvCache
from slipstream_kernels.norm.reference.rms_norm import rms_norm
from slipstream_kernels.rotation import HeadNorms, QKRope, Rope
from slipstream_kernels.token_slots import TokenSlots


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: TokenSlots,
    qk_rope: QKRope,
    cache: KvCache,
) -> torch.Tensor:
    """See ops.rope_write_kv."""
    rope, norms = qk_rope.rope, qk_rope.norms
    if norms is not None and not norms.after_rotation:
        q, k = _head_norms(q, k, norms)
    if rope is not None:
        cos, sin = rope.cos_sin.index_select(0, slots.positions).unsqueeze(1).chunk(2, dim=-1)
        q, k = (rotate(x, cos, sin, rope) for x in (q, k))
    if norms is not None and norms.after_rotation:
        q, k = _head_norms(q, k, norms)
    _append(k, v, cache, slots.slot_mapping)
    return q


def _head_norms(q: torch.Tensor, k: torch.Tensor, norms: HeadNorms) -> tuple[torch.Tensor, torch.Tensor]:
    return _head_norm(q, norms.q, norms.eps), _head_norm(k, norms.k, norms.eps)


def _head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = rms_norm(x.contiguous(), weight, eps, None, None)
    assert isinstance(y, torch.Tensor)  # without a residual there is one result
    return y


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rope: Rope) -> torch.Tensor:
    """x: [num_tokens, num_heads, head_dim]; cos, sin: [num_tokens, 1, rotary_dim / 2] fp32.  Rounds to x's dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = rope.rotary_dim
    halves = (slice(0, size, 2), slice(1, size, 2)) if rope.interleaved else (slice(size // 2), slice(size // 2, size))
    first, second = x[..., halves[0]], x[..., halves[1]]
    out[..., halves[0]] = first * cos - second * sin
    out[..., halves[1]] = second * cos + first * sin
    out[..., size:] = x[..., size:]
    return out


def _append(k: torch.Tensor, v: torch.Tensor, cache: KvCache, slot_mapping: torch.Tensor) -> None:
    written = slot_mapping >= 0
    if not bool(written.all()):
        k, v, slot_mapping = k[written], v[written], slot_mapping[written]
    num_heads, block_size = cache.key.shape[1:3]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    # index_copy_ on the flattened cache [rows, width] copies whole rows in one pass.
    heads = torch.arange(num_heads, device=k.device)
    rows = ((block[:, None] * num_heads + heads) * block_size + offset[:, None]).view(-1)
    for x, store, scale in ((k, cache.key, cache.key_scale), (v, cache.value, cache.value_scale)):
        if store.dtype in TOKEN_SCALED_DTYPES:
            assert scale is not None
            values, row_scale = quantize_rows(x.float(), store.dtype)
            scale.view(-1).index_copy_(0, rows, row_scale.reshape(-1))
        elif store.dtype == FP8_DTYPE:
            scaled = x.float() if scale is None else x.float() / scale[:, None]
            values = scaled.clamp(-LARGEST[FP8_DTYPE], LARGEST[FP8_DTYPE]).to(FP8_DTYPE).view(torch.uint8)
            store = store.view(torch.uint8)  # index_copy_ of fp8 is not implemented everywhere
        else:
            values = x
        store.view(-1, store.shape[3]).index_copy_(0, rows, values.reshape(-1, store.shape[3]))
