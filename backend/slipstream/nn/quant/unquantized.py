"""Weights as they are, in the model's dtype. On CPUs they are packed once for oneDNN."""

from __future__ import annotations

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.quant.method import CheckpointTensors, QuantMethod, Weights, plain_tensors, register


class Unquantized(QuantMethod):
    """weights: "weight" [out, in], "bias" [out] if any, and on a CPU "packed" in place of "weight".

    Of experts: "weight" [num_experts, out of one, in], "counters" of their products.
    """

    def create_weights(self, spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> Weights:
        weights = {"weight": torch.empty(spec.out_features, spec.in_features, device=device, dtype=dtype)}
        if spec.bias:
            weights["bias"] = torch.empty(spec.out_features, device=device, dtype=dtype)
        if spec.num_experts:
            weights["weight"] = weights["weight"].unflatten(0, (spec.num_experts, -1))
            weights["counters"] = ops.expert_counters(device)
        return weights

    def checkpoint_tensors(self, spec: LinearSpec, rows: int) -> CheckpointTensors:
        return plain_tensors(spec, rows)

    def load(self, weights: Weights, suffix: str, rows: slice, tensor: Tensor) -> None:
        stored = weights[suffix]
        (stored.flatten(0, 1) if stored.dim() == 3 else stored)[rows].copy_(tensor)

    def finish(self, weights: Weights, num_experts: int = 0, dtype: torch.dtype | None = None) -> ops.LinearWeight:
        weight, bias = weights["weight"], weights.get("bias")
        packed = ops.repack_plain(weight)
        if packed is weight:
            return ops.plain_weight(weight, bias, weights.get("counters"))
        weights["packed"] = packed
        del weights["weight"]
        return ops.onednn_weight(packed, weight.shape[0], weight.shape[1], bias)


UNQUANTIZED = Unquantized()
register("none", UNQUANTIZED, free_tokens=184)
