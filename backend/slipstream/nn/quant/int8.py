"""int8 weights with one scale per output feature; activations in 16 bits (wint8) or int8 per token (w8a8_int8).

From unquantised checkpoints the weights are quantised on the device, one part at a time as it is loaded. SmoothQuant is
a matter of the checkpoint: its factors are folded into norms and weights before they are stored (build/quantize.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.quant.fp8 import INPUT_SCALE, require_input_scale, widen_input_scale
from slipstream.nn.quant.method import (
    SHAPE,
    CheckpointTensors,
    QuantMethod,
    StoredTensor,
    Weights,
    plain_tensors,
    register,
    require_stored_shape,
)
from slipstream.nn.stored_format import StoredFormat
from slipstream.nn.weight_slot import FLOAT_DTYPES

BYTES_PER_WORD = 4


@dataclass(frozen=True)
class Int8(QuantMethod):
    """stored: the layout of an int8 checkpoint; None: the checkpoint is not quantised.

    weights: "values" int8 [out, in] (without int8_inputs: then as ops.repack_int8 has them), "scales" fp32 [out],
    "counters" if int8_inputs, "bias" if any, "input_scale" fp32 [] if stored.
    """

    int8_inputs: bool = False
    stored: StoredFormat | None = None

    def create_weights(self, spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> Weights:
        weights = {
            "values": torch.empty(spec.out_features, spec.in_features, dtype=torch.int8, device=device),
            "scales": torch.empty(spec.out_features, device=device),
        }
        if self.int8_inputs:
            weights["counters"] = ops.scaled_mm_counters(weights["values"])
        if self.stored is not None and self.stored.static_inputs:
            weights[INPUT_SCALE] = torch.zeros((), device=device)
        if spec.bias:
            weights["bias"] = torch.empty(spec.out_features, dtype=dtype, device=device)
        return weights

    def checkpoint_tensors(self, spec: LinearSpec, rows: int) -> CheckpointTensors:
        tensors = plain_tensors(spec, rows)
        if self.stored is None:
            return tensors
        del tensors["weight"]
        if self.stored.packing:
            tensors["weight_packed"] = StoredTensor(
                (rows, -(-spec.in_features // BYTES_PER_WORD)), ("I32",), 0, 1, 1, BYTES_PER_WORD
            )
            tensors[SHAPE] = StoredTensor((2,), ("I32", "I64"), says_shape=(rows, spec.in_features), is_index=True)
        else:
            tensors["weight"] = StoredTensor((rows, spec.in_features), ("I8",), 0, 1)
        by_channel = StoredTensor((rows, 1), FLOAT_DTYPES, 0)
        by_tensor = StoredTensor((1,), FLOAT_DTYPES)
        tensors[self.stored.scale_name] = by_channel if self.stored.scales == "channel" else by_tensor
        if self.stored.static_inputs:
            tensors[INPUT_SCALE] = StoredTensor((1,), FLOAT_DTYPES)
        return tensors

    def load(self, weights: Weights, suffix: str, rows: slice, tensor: Tensor) -> None:
        values, scales = weights["values"][rows], weights["scales"][rows]
        tensor = tensor.to(values.device)
        if suffix == "bias":
            weights["bias"][rows].copy_(tensor)
        elif suffix == INPUT_SCALE:
            widen_input_scale(weights, tensor)
        elif suffix == "weight" and self.stored is None:
            quantised = ops.quantize_int8_weight(tensor)
            values.copy_(quantised.values)
            scales.copy_(quantised.scales)
        elif suffix == "weight":
            values.copy_(tensor)
        elif suffix == "weight_packed":  # words of unsigned bytes: value + 128
            unsigned = tensor.contiguous().view(torch.uint8)[:, : values.shape[1]]
            values.copy_((unsigned ^ 128).view(torch.int8))
        elif suffix == SHAPE:
            require_stored_shape(tensor, rows, values.shape[1])
        else:
            scales.copy_(tensor.reshape(-1))

    def written_out_bytes(self, spec: LinearSpec, num_rows: int, device: torch.device, dtype: torch.dtype) -> int:
        weight = ops.DenseWeight("int8", spec.out_features, spec.in_features)
        is_plain = not self.int8_inputs and not spec.num_experts
        return ops.dense_written_out_bytes(weight, num_rows, device, dtype) if is_plain else 0

    def finish(self, weights: Weights, num_experts: int = 0, dtype: torch.dtype | None = None) -> ops.LinearWeight:
        require_input_scale(weights)
        if not self.int8_inputs and not num_experts:
            weights["values"] = ops.repack_int8(weights["values"])
        return ops.int8_weight(
            weights["values"],
            weights["scales"],
            weights.get("bias"),
            weights.get("counters"),
            int8_rows=self.int8_inputs,
            input_scale=weights.get(INPUT_SCALE),
            num_experts=num_experts,
        )


register("wint8", Int8(), free_tokens=92, reads=lambda stored: Int8(False, stored))
register("w8a8_int8", Int8(int8_inputs=True), free_tokens=186, reads=lambda stored: Int8(True, stored))
