"""StoredFormat: how a checkpoint stores quantised linear layers, as its config.json says. Plain data, part of the spec.

Which tensors follow from it belongs to the methods in nn/quant/; how config.json says it, to nn/models/quantization.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoredFormat:
    """method: name in QUANT_METHODS of the arithmetic it is made for.

    scales: one weight scale per "tensor", "channel" (output feature) or "block" (128 x 128). scale_name: the suffix of
    their tensor. static_inputs: one input scale per module is stored too. quantized_head: lm_head is stored so as well.
    ignored_suffixes: tensors that belong to the format and are not used here.
    """

    method: str
    scales: str
    scale_name: str = "weight_scale"
    static_inputs: bool = False
    quantized_head: bool = False
    ignored_suffixes: tuple[str, ...] = ()
