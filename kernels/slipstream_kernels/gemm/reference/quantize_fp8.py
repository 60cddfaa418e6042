"""quantize_fp8 and quantize_fp8_blocks in plain torch.

Tensors are divided by tensors throughout: with a plain number torch multiplies by a reciprocal, which rounds twice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slipstream_kernels.fp8 import BLOCK, E4M3, E4M3_MAX, SMALLEST_AMAX, Fp8Rows, Fp8Scheme, activation_sums, empty_rows


def quantize_fp8(x: torch.Tensor, scheme: Fp8Scheme) -> Fp8Rows:
    """See ops.quantize_fp8."""
    num_rows, size = x.shape
    num_groups = scheme.num_groups(size)
    wide = x.float().view(num_rows, num_groups, size // num_groups)
    if scheme.scale is None:
        amax = wide.abs().amax(-1).clamp(min=SMALLEST_AMAX)
        limit = torch.full_like(amax, E4M3_MAX)
        scales, inverse = amax / limit, limit / amax
    else:
        scales = scheme.scale.float().expand(num_rows, 1)
        inverse = torch.ones_like(scales) / scales
    values = (wide * inverse[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    rows = empty_rows(num_rows, size, scheme, x)
    rows.values[:num_rows] = values.view(num_rows, size)
    rows.scales[:num_rows] = scales
    if rows.activation_sums is not None:
        rows.activation_sums.copy_(activation_sums(rows.values[:num_rows], scheme.sum_columns))
    return rows


def quantize_fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.quantize_fp8_blocks."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, 0, 0, -rows % BLOCK))
    blocks = padded.view(-1, BLOCK, columns // BLOCK, BLOCK)
    amax = blocks.abs().amax((1, 3)).clamp(min=SMALLEST_AMAX)
    limit = torch.full_like(amax, E4M3_MAX)
    scaled = blocks * (limit / amax)[:, None, :, None]
    values = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).view(-1, columns)
    return values[:rows], amax / limit
