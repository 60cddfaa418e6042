"""Random 4-bit weights for the tests of GPU kernels."""

from __future__ import annotations

import torch
from slipstream_kernels.integer import Int4Weight


def weight_of(out_features: int, in_features: int, group_size: int, has_zeros: bool) -> Int4Weight:
    """On the GPU.  group_size: 0 is a whole row."""
    group_size = group_size or in_features
    groups = (out_features, in_features // group_size)
    packed = torch.randint(256, (out_features, in_features // 2), dtype=torch.uint8, device="cuda")
    scales = ((0.1 + torch.rand(groups, device="cuda")) * in_features**-0.5 / 4).bfloat16().float()
    zeros = torch.randint(17, groups, dtype=torch.uint8, device="cuda") if has_zeros else None
    return Int4Weight(packed, scales, zeros, group_size, out_features, in_features)
