"""grouped_int4_mm in plain torch: expert by expert, both operands dequantised.  Reads the offsets on the host."""

from __future__ import annotations

from dataclasses import replace

import torch

from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm.reference.int4_mm import dequantize_int4
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe.reference.grouped_mm import by_expert
from slipstream_kernels.routing import Routing


def grouped_int4_mm(
    x: torch.Tensor | Fp8Rows, weight: Int4Weight, routing: Routing, by_token: bool, gated: bool
) -> torch.Tensor:
    """See ops.grouped_int4_mm."""
    out_features = weight.out_features // routing.num_experts

    def weight_of(expert: int) -> torch.Tensor:
        rows = slice(expert * out_features, (expert + 1) * out_features)
        zeros = None if weight.zeros is None else weight.zeros[rows]
        own = replace(
            weight, packed=weight.packed[rows], scales=weight.scales[rows], zeros=zeros, out_features=out_features
        )
        return dequantize_int4(own)

    return by_expert(x, out_features, weight_of, routing, by_token, gated)
