"""StoredFormat: how a checkpoint stores quantised linear layers, as its config.json says. Plain data, part of the spec.

Which tensors follow from it belongs to the methods in nn/quant/; how config.json says it, to nn/models/quantization.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoredFormat:
    """method: name in QUANT_METHODS of the arithmetic it is made for.

    scales: one weight scale per "tensor", "channel" (output feature), "block" (128 x 128) or "group" (of group_size
    input features of a channel). scale_name: the suffix of their tensor. static_inputs: one input scale per module is
    stored too. quantized_head: lm_head is stored so as well. packing: how integers lie in words, "awq", "gptq",
    "gptq_v2", "compressed-tensors" or, of 4 bits, "bytes"; "" is one value per element. has_zeros: zero-points are
    stored. act_order: a group's input features are listed in a tensor instead of lying side by side.
    """

    method: str
    scales: str
    scale_name: str = "weight_scale"
    static_inputs: bool = False
    quantized_head: bool = False
    packing: str = ""
    group_size: int = 0  # of scales "group"
    has_zeros: bool = False
    act_order: bool = False
