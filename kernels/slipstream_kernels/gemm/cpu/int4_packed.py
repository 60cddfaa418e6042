"""4-bit weights in the layout of torch's product for bf16 rows (AVX512, AVX2), and that product.

Group scales are rounded to bf16, and so is the result; sums are fp32, in an order that depends on no other row.
"""

from __future__ import annotations

import torch

from slipstream_kernels.gemm.reference.int4_mm import unpack_int4
from slipstream_kernels.integer import SYMMETRIC_ZERO, Int4Weight

CPU_WORDS = torch.int16  # names the layout: the type that torch's bytes are held as
OUT_FEATURES, GROUP_SIZES = 16, (32, 64, 128)  # multiples and group sizes that torch takes
CAPABILITIES = ("AVX2", "AVX512")  # elsewhere its product is not vectorised


def refusal(weight: Int4Weight) -> str | None:
    """Why a canonical weight has no such layout; None if it has."""
    if torch.backends.cpu.get_cpu_capability() not in CAPABILITIES:
        return f"the CPU has none of {', '.join(CAPABILITIES)}"
    if weight.out_features % OUT_FEATURES:
        return f"out_features: {weight.out_features} is not a multiple of {OUT_FEATURES}"
    if weight.group_size not in GROUP_SIZES:
        return f"group_size: {weight.group_size} is not one of {', '.join(map(str, GROUP_SIZES))}"
    return None


def repack(weight: Int4Weight) -> Int4Weight:
    """As many bytes.  scales: bf16 [groups, out_features, 2]: of a group, and what is added to (code - 8) * scale."""
    codes = unpack_int4(weight.packed).to(torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    zeros = torch.full_like(weight.scales, SYMMETRIC_ZERO) if weight.zeros is None else weight.zeros.float()
    pairs = torch.stack((weight.scales, (SYMMETRIC_ZERO - zeros) * weight.scales), dim=-1)
    scales = pairs.transpose(0, 1).contiguous().bfloat16()
    return Int4Weight(packed.view(CPU_WORDS), scales, None, weight.group_size, weight.out_features, weight.in_features)


def int4_mm(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """See ops.int4_mm."""
    rows, packed = x.bfloat16().contiguous(), weight.packed.view(torch.uint8)
    y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, weight.group_size, weight.scales)
    return (y if bias is None else y + bias).to(x.dtype)
