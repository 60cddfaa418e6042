"""quantize_int8 in plain torch.  Tensors are divided by tensors: with a plain number torch rounds twice."""

from __future__ import annotations

import torch

from slipstream_kernels.integer import INT8_MAX, SMALLEST_AMAX, Int8Rows


def quantize_int8(x: torch.Tensor, scale: torch.Tensor | None) -> Int8Rows:
    """See ops.quantize_int8."""
    wide = x.float()
    if scale is None:
        amax = wide.abs().amax(-1).clamp(min=SMALLEST_AMAX)
        limit = torch.full_like(amax, INT8_MAX)
        scales, inverse = amax / limit, limit / amax
    else:
        scales = scale.reshape(1).expand(x.shape[0]).contiguous()
        inverse = torch.ones_like(scales) / scales
    values = (wide * inverse[:, None]).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return Int8Rows(values, scales, x.dtype)
