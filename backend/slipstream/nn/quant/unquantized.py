"""Weights as they are: a dense product in the model's dtype. On CPUs the weights are packed once for oneDNN."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.quant.activation_quant import PLAIN, A, Activation, ActivationQuant
from slipstream.nn.quant.method import QUANT_METHODS, CheckpointTensors, Weights, plain_tensors


class Unquantized:
    """weights: "weight" [out, in], "bias" [out] if any, and on a CPU "packed" in place of "weight".

    Of experts: "weight" [num_experts, out of one, in].
    """

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def create_weights(self, spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> Weights:
        weights = {"weight": torch.empty(spec.out_features, spec.in_features, device=device, dtype=dtype)}
        if spec.bias:
            weights["bias"] = torch.empty(spec.out_features, device=device, dtype=dtype)
        if spec.num_experts:
            weights["weight"] = weights["weight"].unflatten(0, (spec.num_experts, -1))
        return weights

    def checkpoint_tensors(self, spec: LinearSpec, rows: int) -> CheckpointTensors:
        return plain_tensors(spec, rows)

    def load(self, weights: Weights, suffix: str, rows: slice, tensor: Tensor) -> None:
        stored = weights[suffix]
        (stored.flatten(0, 1) if stored.dim() == 3 else stored)[rows].copy_(tensor)

    def written_out_bytes(self, spec: LinearSpec, dtype: torch.dtype) -> int:
        return 0

    def finish(self, weights: Weights) -> None:
        # Measured on one Zen core, 21M parameters, fp32: F.linear repacks at every call and takes 7.6 | 15.8 | 34.7 ms
        # at 1 | 16 | 64 rows, packed once 5.4 | 8.5 | 26.0 ms.
        if _can_pack(weights["weight"]):
            weights["packed"] = torch.ops.mkldnn._reorder_linear_weight(weights.pop("weight"), None)

    def activation_quant(self, weights: Weights) -> ActivationQuant[Activation]:
        return PLAIN

    def apply(self, weights: Weights, x: Activation) -> Tensor:
        assert isinstance(x, Tensor)
        packed, bias = weights.get("packed"), weights.get("bias")
        if packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        weight = weights["weight"]
        if x.shape[0] <= ops.max_streamed_tokens(weight):
            return ops.skinny_gemm(x, weight, bias=bias)
        if ops.prefers_clusters(x.shape[0], weight):
            return ops.swap_ab_gemm(x, weight, bias=bias)
        return F.linear(x, weight, bias)

    def apply_gated(self, weights: Weights, x: Activation, form: ActivationQuant[A]) -> A:
        assert isinstance(x, Tensor)
        weight, bias = weights.get("weight"), weights.get("bias")
        if weight is not None and x.shape[0] <= ops.max_streamed_tokens(weight):
            return form.cast(ops.skinny_gemm(x, weight, bias=bias, gated=True))
        if weight is not None and ops.prefers_clusters(x.shape[0], weight, gated=True):
            return form.cast(ops.swap_ab_gemm(x, weight, bias=bias, gated=True))
        return form.silu_mul(self.apply(weights, x))

    def finish_experts(self, weights: Weights, num_experts: int) -> None:
        """Weights are held as they are multiplied."""

    def apply_experts(self, weights: Weights, x: Tensor, routing: ops.Routing, by_token: bool, gated: bool) -> Tensor:
        return ops.grouped_mm(x, weights["weight"], routing, by_token=by_token, gated=gated)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dim() != 2 or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


UNQUANTIZED = Unquantized()
QUANT_METHODS.register("none")(UNQUANTIZED)
