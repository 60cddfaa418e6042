"""int4_mm in plain torch: both operands dequantised, then multiplied in fp32.  Codecs of canonical 4-bit weights."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.integer import E2M1, E8M0_BIAS, SYMMETRIC_ZERO, Int4Weight


def int4_mm(x: torch.Tensor | Fp8Rows, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """See ops.int4_mm."""
    dtype = x.dtype
    rows = x.values.float() * x.scales if isinstance(x, Fp8Rows) else x.float()
    y = rows @ dequantize_int4(weight).t()
    return (y if bias is None else y + bias.float()).to(dtype)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] of two codes each -> uint8 [..., 2 n], low nibbles first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 [..., 2 n] -> uint8 [..., n], even positions in low nibbles."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def dequantize_int4(weight: Int4Weight) -> torch.Tensor:
    """[out_features, in_features] fp32 of a canonical weight."""
    codes = unpack_int4(weight.packed).unflatten(1, (-1, weight.group_size))
    if weight.is_e2m1:
        values = torch.tensor(E2M1, device=codes.device)[codes.int()]
        return torch.ldexp(values, weight.scales.int()[..., None] - E8M0_BIAS).flatten(1)
    zeros = SYMMETRIC_ZERO if weight.zeros is None else weight.zeros.float()[..., None]
    return ((codes.float() - zeros) * weight.scales[..., None]).flatten(1)
