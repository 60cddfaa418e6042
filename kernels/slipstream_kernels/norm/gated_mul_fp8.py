"""gated_mul_fp8: contract and choice.  The gated activation and its quantisation in one pass over memory."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import Fp8Rows, Fp8Scheme
from slipstream_kernels.norm.gated_mul import require_gated
from slipstream_kernels.select import select


def gated_mul_fp8(x: torch.Tensor, activation: str, scheme: Fp8Scheme, *, backend: str = "auto") -> Fp8Rows:
    """quantize_fp8(activation(gate) * up) for x = [gate, up] along the last dimension, with the rounding of gated_mul.

    x: [num_tokens, 2 * size], last dimension contiguous.  activation: as of gated_mul.  Returns rows of `size` columns.
    """
    require_gated(x, activation)
    scheme.check(x.shape[1] // 2)
    return select("norm.gated_mul_fp8", backend, x).gated_mul_fp8(x, activation, scheme)


def silu_mul_fp8(x: torch.Tensor, scheme: Fp8Scheme, *, backend: str = "auto") -> Fp8Rows:
    """gated_mul_fp8 by silu."""
    return gated_mul_fp8(x, "silu", scheme, backend=backend)


def gelu_mul_fp8(x: torch.Tensor, scheme: Fp8Scheme, *, backend: str = "auto") -> Fp8Rows:
    """gated_mul_fp8 by gelu_tanh."""
    return gated_mul_fp8(x, "gelu_tanh", scheme, backend=backend)
