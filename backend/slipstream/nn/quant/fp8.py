"""FP8 weights with one scale per output feature, activations quantised per token, or by a stored scale.

From unquantised checkpoints the weights are quantised on the device, one part at a time as it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.quant.method import (
    CheckpointTensors,
    QuantMethod,
    StoredTensor,
    Weights,
    plain_tensors,
    register,
)
from slipstream.nn.stored_format import StoredFormat
from slipstream.nn.weight_slot import FLOAT_DTYPES

E4M3_DTYPES = ("F8_E4M3",)
INPUT_SCALE = "input_scale"


def quantised_weights(spec: LinearSpec, scales: Tensor, dtype: torch.dtype) -> Weights:
    """Weights e4m3 [out, in], their scales, the counters of ops.scaled_mm, and the bias in `dtype` if any."""
    weight = torch.empty(spec.out_features, spec.in_features, dtype=torch.float8_e4m3fn, device=scales.device)
    weights = {"weight": weight, "scale": scales, "counters": ops.scaled_mm_counters(weight)}
    if spec.bias:
        weights["bias"] = torch.empty(spec.out_features, dtype=dtype, device=scales.device)
    return weights


def held_weight(weights: Weights, num_experts: int) -> ops.LinearWeight:
    """Weights are held as they are multiplied."""
    return ops.fp8_weight(
        weights["weight"],
        weights["scale"],
        weights.get("bias"),
        weights["counters"],
        input_scale=weights.get(INPUT_SCALE),
        num_experts=num_experts,
    )


def widen_input_scale(weights: Weights, stored: Tensor) -> None:
    """Parts merged into one layer share their input: the widest range serves all of them. Experts that no calibration
    reached may store 0. Raises ValueError for what is no scale."""
    scale = weights[INPUT_SCALE]
    if not (stored.isfinite().all() and (stored >= 0).all()):
        raise ValueError("is no finite number of at least 0")
    scale.copy_(torch.maximum(scale, stored.to(scale).reshape(())))


def require_input_scale(weights: Weights) -> None:
    """Raises ValueError for a layer whose inputs could not be quantised."""
    if INPUT_SCALE in weights and not weights[INPUT_SCALE] > 0:
        raise ValueError("is of a layer whose input scales are all 0; accepted: one above 0")


@dataclass(frozen=True)
class Fp8(QuantMethod):
    """stored: the layout of an FP8 checkpoint; None: the checkpoint is not quantised.

    weights: "weight" e4m3 [out, in], "scale" fp32 [out], "counters", "bias" if any, "input_scale" fp32 [] if stored.
    """

    stored: StoredFormat | None = None

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return ops.fp8_refusal(device, dtype)

    def split_sums_bytes(self, num_sms: int) -> int:
        return ops.fp8_sums_bytes(num_sms)

    def create_weights(self, spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> Weights:
        weights = quantised_weights(spec, torch.empty(spec.out_features, device=device), dtype)
        if self.stored is not None and self.stored.static_inputs:
            weights[INPUT_SCALE] = torch.zeros((), device=device)
        return weights

    def checkpoint_tensors(self, spec: LinearSpec, rows: int) -> CheckpointTensors:
        tensors = plain_tensors(spec, rows)
        if self.stored is None:
            return tensors
        tensors["weight"] = StoredTensor((rows, spec.in_features), E4M3_DTYPES, 0, 1)
        by_channel = StoredTensor((rows, 1), FLOAT_DTYPES, 0)
        by_tensor = StoredTensor((1,), FLOAT_DTYPES)
        tensors[self.stored.scale_name] = by_channel if self.stored.scales == "channel" else by_tensor
        if self.stored.static_inputs:
            tensors[self.stored.input_scale_name] = StoredTensor((1,), FLOAT_DTYPES)
        return tensors

    def load(self, weights: Weights, suffix: str, rows: slice, tensor: Tensor) -> None:
        if suffix == "bias":
            weights["bias"][rows].copy_(tensor)
        elif self.stored is not None and suffix == self.stored.input_scale_name:
            widen_input_scale(weights, tensor)
        elif suffix != "weight":
            weights["scale"][rows].copy_(tensor.reshape(-1))
        elif self.stored is not None:
            weights["weight"][rows].copy_(tensor)
        else:
            tensor = tensor.to(weights["weight"].device).contiguous()  # experts may be stored transposed
            quantised = ops.quantize_fp8(tensor)
            weights["weight"][rows].copy_(quantised.values)
            weights["scale"][rows].copy_(quantised.scales.view(-1))

    def finish(self, weights: Weights, num_experts: int = 0, dtype: torch.dtype | None = None) -> ops.LinearWeight:
        require_input_scale(weights)
        return held_weight(weights, num_experts)


register("fp8", Fp8(), free_tokens=186, reads=Fp8)
