"""merge_attention: contract and choice.  Attention over two sets of keys from the results over each."""

from __future__ import annotations

import torch

from slipstream_kernels.select import require_float, require_shape, select


def merge_attention(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor, *, backend: str = "auto"
) -> None:
    """Change out and lse into the result over the keys of both.

    out, other: [num_tokens, num_heads, value_dim], contiguous; lse, other_lse: [num_tokens, num_heads] fp32, natural
    logarithms of sums of exponentials, -inf for no keys (whose values may be anything).  Source: arXiv:2501.01005,
    section 2.2.
    """
    require_float("out", out)
    require_shape("other", other, tuple(out.shape))
    for name, tensor in (("lse", lse), ("other_lse", other_lse)):
        require_shape(name, tensor, tuple(out.shape[:2]))
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name}: dtype {tensor.dtype}, expected float32")
    if other.dtype != out.dtype or not all(tensor.is_contiguous() for tensor in (out, lse, other, other_lse)):
        raise ValueError(f"other: must be contiguous and {out.dtype}, as must all tensors")
    select("attention.merge_attention", backend, out).merge_attention(out, lse, other, other_lse)
