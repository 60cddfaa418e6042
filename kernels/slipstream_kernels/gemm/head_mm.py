"""head_mm, invariant_head_mm: contract and choice.  Each head's own product: queries and values of latent attention.

x: [num_tokens, num_heads, in_features] fp32, bf16 or fp16.  out: [num_tokens, num_heads, out_features].
weight: [num_heads, out_features, in_features], one of the last two dimensions contiguous.  All of one dtype; of x and
out the last dimension is contiguous.
"""

from __future__ import annotations

import torch

from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select

MAX_TOKENS, MAX_ROWS = 64, 2048  # tokens, and of all heads: above them the library's batched product is as fast
MAX_IN_FEATURES = 1024  # of a tile of weights, which is loaded whole


def head_mm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Write out[t, h] = x[t, h] @ weight[h].T, accumulated in fp32; return out."""
    check_heads(x, weight, out)
    select("gemm.head_mm", backend, x, few_tokens_refusal(x)).head_mm(x, weight, out)
    return out


def few_tokens_refusal(x: torch.Tensor) -> str | None:
    """Why the kernel of few tokens does not multiply these; None if it does."""
    num_tokens, num_heads, in_features = x.shape
    if num_tokens > MAX_TOKENS or num_tokens * num_heads > MAX_ROWS:
        return f"{num_tokens} tokens of {num_heads} heads are more than {MAX_TOKENS}, or {MAX_ROWS} rows"
    if in_features > MAX_IN_FEATURES or x.dtype == torch.float32:
        return f"{in_features} input features are more than {MAX_IN_FEATURES}, or x is {x.dtype}"
    return None


def invariant_head_mm(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """As head_mm.  A row is the same to the bit whatever the others are: sums are split as ops.invariant_mm's.

    That is triton's; the reference's rows agree to fp32's rounding.
    """
    check_heads(x, weight, out)
    select("gemm.invariant_head_mm", backend, x).invariant_head_mm(x, weight, out)
    return out


def check_heads(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Raise ValueError unless x and out are rows of each head and weight their products'."""
    require_float("x", x)
    num_heads, out_features, in_features = weight.shape
    require_shape("x", x, (x.shape[0], num_heads, in_features))
    require_shape("out", out, (x.shape[0], num_heads, out_features))
    for name, tensor in (("weight", weight), ("out", out)):
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name}: dtype {tensor.dtype}, expected {x.dtype}")
    for name, tensor in (("x", x), ("out", out)):
        require_unit_stride(name, tensor)
    if 1 not in weight.stride()[1:]:
        raise ValueError(f"weight: strides {weight.stride()}, expected 1 in one of the last two")
