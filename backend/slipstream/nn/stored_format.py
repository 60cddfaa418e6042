"""StoredFormat: how a checkpoint stores quantised linear layers, from its config.json. Plain data, part of the spec.

nn/models/quantization.py parses config.json; the methods in nn/quant/ know the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoredFormat:
    """method: name in QUANT_METHODS of its arithmetic.

    scales: one weight scale per "tensor", "channel" (output feature), "block" (128 x 128) or "group" (of group_size
    input features of a channel). scale_name: the suffix of their tensor. static_inputs: one input scale per module is
    stored, with the suffix input_scale_name. quantized_head: lm_head is quantised too. packing: of integers in words:
    "awq", "gptq", "gptq_v2", "compressed-tensors" or, for 4 bits, "bytes"; "": one value per element. has_zeros:
    zero-points are stored. act_order: a tensor lists the group of each input feature; otherwise groups are contiguous.
    """

    method: str
    scales: str
    scale_name: str = "weight_scale"
    static_inputs: bool = False
    input_scale_name: str = "input_scale"
    quantized_head: bool = False
    packing: str = ""
    group_size: int = 0  # only with scales "group"
    has_zeros: bool = False
    act_order: bool = False
