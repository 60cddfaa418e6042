"""ragged_attention: contract and choice.  Queries over keys and values that lie side by side instead of in blocks."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.ragged_call import RaggedCall
from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select, select_cuda

OP = "attention.ragged_attention"


def ragged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    query_start_loc: torch.Tensor,
    key_start_loc: torch.Tensor,
    key_lens: torch.Tensor,
    *,
    max_query_len: int,
    max_key_len: int,
    scale: float,
    is_causal: bool,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend each query token to its own request's keys, of which a part is shared by all heads (MLA, un-absorbed).

    q: [num_tokens, num_heads, nope + rope_dim].  k: [num_keys, num_heads, nope].  k_rope: [num_keys, rope_dim].
    v: [num_keys, num_heads, value_dim].  Last dimensions are contiguous, others strided.
    query_start_loc, key_start_loc: [num_requests + 1] int32.  key_lens: [num_requests] int32: request r has the keys
    from key_start_loc[r] on, with any rows behind them.  is_causal: row i of a request sees its keys up to
    key_len - query_len + i, else all.  max_query_len, max_key_len: host-side upper bounds.
    Returns (out [num_tokens, num_heads, value_dim], dtype of q; the natural logarithm of the sum of exponentials
    [num_tokens, num_heads] fp32).  A row without keys is zero with -inf.  Rows past query_start_loc[-1] are
    unspecified.  Source: FlashAttention-2, arXiv:2307.08691.
    """
    require_float("q", q)
    (num_tokens, num_heads, dim), (num_keys, _, nope) = q.shape, k.shape
    require_shape("k", k, (num_keys, num_heads, nope))
    require_shape("k_rope", k_rope, (num_keys, dim - nope))
    require_shape("v", v, (num_keys, num_heads, v.shape[-1]))
    for name, tensor in (("q", q), ("k", k), ("k_rope", k_rope), ("v", v)):
        require_unit_stride(name, tensor)
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name}: dtype {tensor.dtype}, expected q's {q.dtype}")
    num_requests = key_lens.shape[0]
    for name, numbers, size in (
        ("query_start_loc", query_start_loc, num_requests + 1),
        ("key_start_loc", key_start_loc, num_requests + 1),
        ("key_lens", key_lens, num_requests),
    ):
        require_shape(name, numbers, (size,))
        if numbers.dtype != torch.int32:
            raise ValueError(f"{name}: dtype {numbers.dtype}, expected int32")
    shape = (num_tokens, num_heads, v.shape[-1])
    if out is None:
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
    require_shape("out", out, shape)
    if out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out: must be contiguous and {q.dtype}")
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    call = RaggedCall(
        q, k, k_rope, v, query_start_loc, key_start_loc, key_lens, out, lse, max_query_len, max_key_len, scale,
        is_causal,
    )  # fmt: skip
    version = select_cuda(OP, OP, backend, q.is_cuda, lambda cuda: cuda.refusal(call))
    (version or select(OP, backend, q)).ragged_attention(call)
    return out, lse
