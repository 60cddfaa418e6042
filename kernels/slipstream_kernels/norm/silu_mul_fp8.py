"""silu_mul_fp8: contract and choice.  The gated activation and its quantisation in one pass over memory."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import Fp8Rows, Fp8Scheme
from slipstream_kernels.select import require_float, require_unit_stride, select


def silu_mul_fp8(x: torch.Tensor, scheme: Fp8Scheme, *, backend: str = "auto") -> Fp8Rows:
    """quantize_fp8(silu(gate) * up) for x = [gate, up] along the last dimension, with the rounding of silu_mul.

    x: [num_tokens, 2 * size], last dimension contiguous.  Returns rows of `size` columns.
    """
    require_float("x", x)
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected [num_tokens, 2 * size]")
    require_unit_stride("x", x)
    scheme.check(x.shape[1] // 2)
    return select("norm.silu_mul_fp8", backend, x).silu_mul_fp8(x, scheme)
