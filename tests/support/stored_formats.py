"""Every stored format of linear layers, with random tensors, made without the libraries that write them."""

from __future__ import annotations

import torch
from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.quant.method import READERS, QuantMethod
from slipstream.nn.quant.unquantized import UNQUANTIZED
from slipstream.nn.stored_format import StoredFormat
from slipstream.nn.weight_slot import WeightSlot

GROUPS = {"scales": "group", "group_size": 32}
STORED = {
    "none": None,
    "fp8-channel": StoredFormat("fp8", "channel"),
    "fp8-tensor-static": StoredFormat("fp8", "tensor", static_inputs=True),
    "fp8-block": StoredFormat("block_wise_fp8", "block", "weight_scale_inv"),
    "int8-channel": StoredFormat("w8a8_int8", "channel"),
    "int8-tensor-static": StoredFormat("w8a8_int8", "tensor", static_inputs=True),
    "int8-packed": StoredFormat("wint8", "channel", packing="compressed-tensors"),
    "awq": StoredFormat("wint4", packing="awq", has_zeros=True, **GROUPS),
    "gptq": StoredFormat("wint4", packing="gptq", has_zeros=True, **GROUPS),
    "gptq-symmetric": StoredFormat("wint4", packing="gptq", **GROUPS),
    "gptq-v2-act-order": StoredFormat("wint4", packing="gptq_v2", has_zeros=True, act_order=True, **GROUPS),
    "int4-packed": StoredFormat("wint4", packing="compressed-tensors", has_zeros=True, **GROUPS),
    "int4-packed-act-order": StoredFormat("wint4", packing="compressed-tensors", act_order=True, **GROUPS),
    "int4-packed-rows": StoredFormat("wint4", "group", packing="compressed-tensors"),
    "mxfp4": StoredFormat("mxfp4", "block", "scales"),
    "int4-bytes": StoredFormat("w4a8_fp8", packing="bytes", **GROUPS),
}


def method_of(name: str) -> QuantMethod:
    stored = STORED[name]
    return UNQUANTIZED if stored is None else READERS[stored.method](stored)


def drawn(slot: WeightSlot, suffix: str, generator: torch.Generator) -> torch.Tensor:
    """Contents that the format may have. Orders of input features are the same for all parts of a layer."""
    kind, shape = slot.dtypes[0], slot.shape
    if slot.says_shape is not None:
        return torch.tensor(slot.says_shape)
    if suffix == "g_idx" or suffix == "weight_g_idx":
        order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(5))
        order = torch.arange(shape[0]) if slot.is_optional else order  # of formats that need none
        return (order // 32).int()
    if suffix == "qzeros" and slot.is_index:  # says nothing: 8, less one
        return torch.full(shape, 0x77777777, dtype=torch.int32)
    if kind == "I32":
        return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).int()
    if kind == "U8":  # of scales, exponents of small numbers
        low, high = (120, 130) if "scale" in suffix else (0, 256)
        return torch.randint(low, high, shape, generator=generator).to(torch.uint8)
    if kind == "I8":
        return torch.randint(-8, 8, shape, generator=generator).to(torch.int8)
    values = torch.randn(shape, generator=generator)
    if kind == "F8_E4M3":
        return values.to(torch.float8_e4m3fn)
    return values.abs() + 0.1 if "scale" in suffix else values


def linear_spec(bias: bool = False) -> LinearSpec:
    """Parts of 256 | 128 | 128 rows of 256 features."""
    return LinearSpec(256, (("q", 256), ("k", 128), ("v", 128)), bias)
