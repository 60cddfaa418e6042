"""gated_mul, silu_mul, gelu_mul: contract and choice.  The gated activation of Llama's and of Gemma's MLPs."""

from __future__ import annotations

import torch

from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select

ACTIVATIONS = ("silu", "gelu_tanh")


def gated_mul(
    x: torch.Tensor, activation: str, *, out: torch.Tensor | None = None, backend: str = "auto"
) -> torch.Tensor:
    """Return activation(gate) * up for x = [gate, up] along the last dimension.

    x: [num_tokens, 2 * size], last dimension contiguous.  Returns [num_tokens, size], x's dtype, contiguous.
    activation: silu, or gelu_tanh: gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate^3))).  It is computed in
    fp32 and rounded to x's dtype before the product, as Hugging Face's MLPs do.  Sources: arXiv:2002.05202,
    arXiv:1606.08415.
    """
    require_gated(x, activation)
    if out is not None:
        require_shape("out", out, (x.shape[0], x.shape[1] // 2))
        if out.dtype != x.dtype or not out.is_contiguous():
            raise ValueError(f"out: must be contiguous and {x.dtype}")
    return select("norm.gated_mul", backend, x).gated_mul(x, activation, out)


def silu_mul(x: torch.Tensor, *, out: torch.Tensor | None = None, backend: str = "auto") -> torch.Tensor:
    """gated_mul by silu, of Llama-style MLPs."""
    return gated_mul(x, "silu", out=out, backend=backend)


def gelu_mul(x: torch.Tensor, *, out: torch.Tensor | None = None, backend: str = "auto") -> torch.Tensor:
    """gated_mul by gelu_tanh, of Gemma-style MLPs."""
    return gated_mul(x, "gelu_tanh", out=out, backend=backend)


def require_gated(x: torch.Tensor, activation: str) -> None:
    """Raise ValueError unless x is rows [gate, up] and the activation is one of ACTIVATIONS."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    require_float("x", x)
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected [num_tokens, 2 * size]")
    require_unit_stride("x", x)
