"""ragged_attention: contract and choice.  Queries over keys and values that lie side by side instead of in blocks."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.ragged_call import RaggedCall, RaggedKeys, RaggedMetadata
from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select, select_cuda

OP = "attention.ragged_attention"


def ragged_attention(
    q: torch.Tensor,
    keys: RaggedKeys,
    metadata: RaggedMetadata,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend each query token to its own request's keys, of which a part is shared by all heads (MLA, un-absorbed).

    q: [num_tokens, num_heads, nope + rope_dim], the last dimension contiguous.  scale multiplies q.k.
    Returns (out [num_tokens, num_heads, value_dim], dtype of q; the natural logarithm of the sum of exponentials
    [num_tokens, num_heads] fp32).  A row without keys is zero with -inf.  Rows past query_start_loc[-1] are
    unspecified.  Source: FlashAttention-2, arXiv:2307.08691.
    """
    _check_rows(q, keys)
    _check_requests(metadata)
    num_tokens, num_heads = q.shape[:2]
    shape = (num_tokens, num_heads, keys.v.shape[-1])
    if out is None:
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
    require_shape("out", out, shape)
    if out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out: must be contiguous and {q.dtype}")
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    call = RaggedCall(q, keys, metadata, scale, out, lse)
    version = select_cuda(OP, OP, backend, q.is_cuda, lambda cuda: cuda.refusal(call))
    (version or select(OP, backend, q)).ragged_attention(call)
    return out, lse


def _check_rows(q: torch.Tensor, keys: RaggedKeys) -> None:
    require_float("q", q)
    (_, num_heads, dim), (num_keys, _, nope) = q.shape, keys.k.shape
    require_shape("k", keys.k, (num_keys, num_heads, nope))
    require_shape("k_rope", keys.k_rope, (num_keys, dim - nope))
    require_shape("v", keys.v, (num_keys, num_heads, keys.v.shape[-1]))
    for name, tensor in (("q", q), ("k", keys.k), ("k_rope", keys.k_rope), ("v", keys.v)):
        require_unit_stride(name, tensor)
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name}: dtype {tensor.dtype}, expected q's {q.dtype}")


def _check_requests(metadata: RaggedMetadata) -> None:
    for name, numbers, size in (
        ("query_start_loc", metadata.query_start_loc, metadata.num_requests + 1),
        ("key_start_loc", metadata.key_start_loc, metadata.num_requests + 1),
        ("key_lens", metadata.key_lens, metadata.num_requests),
    ):
        require_shape(name, numbers, (size,))
        if numbers.dtype != torch.int32:
            raise ValueError(f"{name}: dtype {numbers.dtype}, expected int32")
