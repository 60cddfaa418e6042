"""rms_norm_fp8: contract and choice.  Residual, norm and quantisation in one pass over memory."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import Fp8Rows, Fp8Scheme
from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select


def rms_norm_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    scheme: Fp8Scheme,
    *,
    backend: str = "auto",
) -> tuple[Fp8Rows, torch.Tensor]:
    """(quantize_fp8(y), x + residual) where y = rms_norm(x + residual), with the rounding steps of those two ops.

    x: [num_tokens, size], last dimension contiguous.  weight: [size], dtype of x.  residual: shape and dtype of x, or
    None: x itself is normalised and returned.
    """
    require_float("x", x)
    if x.dim() != 2:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected [num_tokens, size]")
    require_unit_stride("x", x)
    require_shape("weight", weight, (x.shape[1],))
    if residual is not None:
        require_shape("residual", residual, x.shape)
        require_unit_stride("residual", residual)
    for name, tensor in (("weight", weight), ("residual", residual)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise ValueError(f"{name}: dtype {tensor.dtype}, expected x's {x.dtype}")
    scheme.check(x.shape[1])
    return select("norm.rms_norm_fp8", backend, x).rms_norm_fp8(x, weight, eps, residual, scheme)
