"""FP8 weights with one scale per output feature, activations quantised per token, or by a stored scale.

From unquantised checkpoints the weights are quantised on the device, one part at a time as it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.quant import activation_quant
from slipstream.nn.quant.activation_quant import A, Activation, ActivationQuant
from slipstream.nn.quant.method import QUANT_METHODS, CheckpointTensors, StoredTensor, Weights, plain_tensors
from slipstream.nn.stored_format import StoredFormat
from slipstream.nn.weight_slot import FLOAT_DTYPES

E4M3_DTYPES = ("F8_E4M3",)
INPUT_SCALE = "input_scale"


def fp8_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why FP8 products cannot run: on a GPU they need Hopper's tensor cores and bf16 results; a CPU takes any."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"FP8 products are written for compute capability 9.0, this GPU has {major}.{minor}"
    return None if dtype == torch.bfloat16 else f"FP8 products give bfloat16 on a GPU, not {dtype}"


def quantised_weights(spec: LinearSpec, scales: Tensor, dtype: torch.dtype) -> Weights:
    """Weights e4m3 [out, in], their scales, the counters of ops.scaled_mm, and the bias in `dtype` if any."""
    weight = torch.empty(spec.out_features, spec.in_features, dtype=torch.float8_e4m3fn, device=scales.device)
    weights = {"weight": weight, "scale": scales, "counters": ops.scaled_mm_counters(weight)}
    if spec.bias:
        weights["bias"] = torch.empty(spec.out_features, dtype=dtype, device=scales.device)
    return weights


def fp8_form(scheme: ops.Fp8Scheme, weights: Weights) -> activation_quant.Fp8:
    """Rows quantised by the scheme, or plain where they are so few that the product streams the weight."""
    return activation_quant.Fp8(scheme, ops.max_streamed_tokens(weights["weight"], weights["scale"]))


def multiply_fp8(weights: Weights, x: Activation) -> Tensor:
    """The product of rows in `fp8_form`: plain ones by weights expanded in registers, e4m3 ones by tensor cores."""
    assert not isinstance(x, ops.Int8Rows)
    weight, scales, bias = weights["weight"], weights["scale"], weights.get("bias")
    if isinstance(x, Tensor):
        return ops.skinny_gemm(x, weight, scales, bias)
    if ops.prefers_clusters(x.num_tokens, weight, scales):
        return ops.swap_ab_gemm(x, weight, scales, bias)
    return ops.scaled_mm(x, weight, scales, bias, counters=weights["counters"])


def multiply_fp8_gated(weights: Weights, x: Activation, form: ActivationQuant[A]) -> A:
    """silu(gate) · up of that product, in `form`."""
    assert not isinstance(x, ops.Int8Rows)
    weight, scales, bias = weights["weight"], weights["scale"], weights.get("bias")
    if isinstance(x, Tensor):
        return form.cast(ops.skinny_gemm(x, weight, scales, bias, gated=True))
    if ops.prefers_clusters(x.num_tokens, weight, scales, gated=True):
        return form.cast(ops.swap_ab_gemm(x, weight, scales, bias, gated=True))
    return form.silu_mul(multiply_fp8(weights, x))


@dataclass(frozen=True)
class Fp8:
    """stored: the layout of an FP8 checkpoint; None: the checkpoint is not quantised.

    weights: "weight" e4m3 [out, in], "scale" fp32 [out], "counters", "bias" if any, "input_scale" fp32 [] if stored.
    """

    stored: StoredFormat | None = None

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return fp8_refusal(device, dtype)

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
            tensors[INPUT_SCALE] = StoredTensor((1,), FLOAT_DTYPES)
        return tensors

    def load(self, weights: Weights, suffix: str, rows: slice, tensor: Tensor) -> None:
        if suffix == "bias":
            weights["bias"][rows].copy_(tensor)
        elif suffix == INPUT_SCALE:
            # parts merged into one layer share their input: the widest range serves all of them
            scale = weights[INPUT_SCALE]
            scale.copy_(torch.maximum(scale, tensor.to(scale).reshape(())))
        elif suffix != "weight":
            weights["scale"][rows].copy_(tensor.reshape(-1))
        elif self.stored is not None:
            weights["weight"][rows].copy_(tensor)
        else:
            quantised = ops.quantize_fp8(tensor.to(weights["weight"].device))
            weights["weight"][rows].copy_(quantised.values)
            weights["scale"][rows].copy_(quantised.scales.view(-1))

    def written_out_bytes(self, spec: LinearSpec, dtype: torch.dtype) -> int:
        return 0

    def finish(self, weights: Weights) -> None:
        """Weights are held as they are multiplied."""

    def activation_quant(self, weights: Weights) -> ActivationQuant[Activation]:
        return fp8_form(ops.Fp8Scheme(scale=weights.get(INPUT_SCALE)), weights)

    def apply(self, weights: Weights, x: Activation) -> Tensor:
        return multiply_fp8(weights, x)

    def apply_gated(self, weights: Weights, x: Activation, form: ActivationQuant[A]) -> A:
        return multiply_fp8_gated(weights, x, form)

    def finish_experts(self, weights: Weights, num_experts: int) -> None:
        """Weights are held as they are multiplied."""

    def apply_experts(self, weights: Weights, x: Tensor, routing: ops.Routing, by_token: bool, gated: bool) -> Tensor:
        values, scales = (weights[name].unflatten(0, (routing.num_experts, -1)) for name in ("weight", "scale"))
        rows = ops.quantize_fp8(x, ops.Fp8Scheme(scale=weights.get(INPUT_SCALE)))
        return ops.grouped_mm(rows, values, routing, scales, by_token=by_token, gated=gated)


QUANT_METHODS.register("fp8")(Fp8())
