"""silu_mul: contract and choice.  The gated activation of Llama-style MLPs."""

from __future__ import annotations

import torch

from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select


def silu_mul(x: torch.Tensor, *, out: torch.Tensor | None = None, backend: str = "auto") -> torch.Tensor:
    """Return silu(gate) * up for x = [gate, up] along the last dimension.

    x: [num_tokens, 2 * size], last dimension contiguous.  Returns [num_tokens, size], x's dtype, contiguous.
    silu is computed in fp32 and rounded to x's dtype before the product, as Hugging Face's MLP does.  Source:
    arXiv:2002.05202.
    """
    require_float("x", x)
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected [num_tokens, 2 * size]")
    require_unit_stride("x", x)
    if out is not None:
        require_shape("out", out, (x.shape[0], x.shape[1] // 2))
        if out.dtype != x.dtype or not out.is_contiguous():
            raise ValueError(f"out: must be contiguous and {x.dtype}")
    return select("norm.silu_mul", backend, x).silu_mul(x, out)
