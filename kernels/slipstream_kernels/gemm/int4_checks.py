"""Checks of canonical 4-bit weights, which all their operations share."""

from __future__ import annotations

import logging
from functools import cache

import torch

from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.select import require_shape

LOG = logging.getLogger(__name__)
TRITON_BLOCK = 128  # input features that gemm/triton/int4_mm.py takes at a time


def check_int4(weight: Int4Weight) -> None:
    """Raise ValueError unless the weight is canonical and its tensors fit its sizes."""
    out_features, in_features, group_size = weight.out_features, weight.in_features, weight.group_size
    if in_features % 2 or group_size < 1 or in_features % group_size:
        raise ValueError(f"group_size: {group_size} does not divide an even number of input features: {in_features}")
    if weight.packed.dtype != torch.uint8:
        raise ValueError(f"packed: dtype {weight.packed.dtype}, expected uint8")
    require_shape("packed", weight.packed, (out_features, in_features // 2))
    require_shape("scales", weight.scales, (out_features, in_features // group_size))
    scale_dtype = torch.uint8 if weight.is_e2m1 else torch.float32
    if weight.scales.dtype != scale_dtype:
        raise ValueError(f"scales: dtype {weight.scales.dtype}, expected {scale_dtype}")
    if weight.is_e2m1 and weight.zeros is not None:
        raise ValueError("zeros: e2m1 weights have none")
    if weight.zeros is not None:
        require_shape("zeros", weight.zeros, tuple(weight.scales.shape))
        if weight.zeros.dtype != torch.uint8:
            raise ValueError(f"zeros: dtype {weight.zeros.dtype}, expected uint8")


def group_refusal(group_size: int, in_features: int) -> str | None:
    """Why the versions in Triton-lang cannot take canonical weights of such groups; None if they can."""
    if group_size % TRITON_BLOCK and group_size not in (32, 64, in_features):
        return f"group_size {group_size} is neither 32, 64, a multiple of {TRITON_BLOCK} nor the whole row"
    return None


def write_out_refusal(group_size: int) -> str | None:
    """Why canonical weights of such groups cannot be written out in 16 bits; None if they can."""
    return f"group_size {group_size} is odd: the weights of a byte have two scales" if group_size % 2 else None


@cache  # a line for each size, not for each layer
def warn_of_canonical(size: str, reason: str) -> None:
    """Log that a 4-bit weight is not prepacked for the kernels of its GPU, and why."""
    LOG.warning("4-bit weights of %s stay in canonical order, whose products are slower: %s", size, reason)
