"""MXFP4: weights e2m1 with one power of two per 32 input features, as gpt-oss stores its experts.

Weights keep their 4 bits in memory; activations are 16 bits. Source: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.quant.method import CheckpointTensors, QuantMethod, StoredTensor, Weights, plain_tensors, register
from slipstream.nn.stored_format import StoredFormat

NAME, GROUP = "mxfp4", 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by their codes; codes from 8 on are negative
BIAS, LARGEST_EXPONENT = 127, 2  # of the scales; of 6, the largest e2m1
LARGEST_SCALE = 160  # 2^33, what kernels multiply by; the format goes to 254, and 255 is no number


class RoundedToMXFP4(QuantMethod):
    """Weights that are rounded as they are loaded.

    weights: "packed" uint8 [out, in / 2], two e2m1 a byte, the first in its low bits; "scales" uint8 [out, in / 32],
    e8m0; "bias" if any.
    """

    def create_weights(self, spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> Weights:
        if spec.in_features % GROUP:
            raise ConfigError("quantization", NAME, f"{spec.in_features} input features are not a multiple of {GROUP}")
        rows, columns = spec.out_features, spec.in_features
        weights = {
            "packed": torch.empty(rows, columns // 2, dtype=torch.uint8, device=device),
            "scales": torch.empty(rows, columns // GROUP, dtype=torch.uint8, device=device),
        }
        if spec.bias:
            weights["bias"] = torch.empty(rows, dtype=dtype, device=device)
        return weights

    def checkpoint_tensors(self, spec: LinearSpec, rows: int) -> CheckpointTensors:
        return plain_tensors(spec, rows)

    def load(self, weights: Weights, suffix: str, rows: slice, tensor: Tensor) -> None:
        if suffix == "bias":
            weights["bias"][rows].copy_(tensor)
            return
        codes, scales = _rounded(tensor.to(weights["packed"].device))
        weights["packed"][rows].copy_(ops.pack_int4(codes))
        weights["scales"][rows].copy_(scales)

    def written_out_bytes(self, spec: LinearSpec, num_rows: int, device: torch.device, dtype: torch.dtype) -> int:
        if not spec.num_experts or dtype != torch.bfloat16:  # rows of another type are multiplied by the codes
            return 0
        experts = ops.Int4Experts(spec.num_experts, spec.out_features, spec.in_features, GROUP, NAME)
        return ops.experts_written_out_bytes(experts, num_rows, device, dtype)

    def finish(self, weights: Weights, num_experts: int = 0, dtype: torch.dtype | None = None) -> ops.LinearWeight:
        packed, scales = weights["packed"], weights["scales"]
        weight = ops.Int4Weight(packed, scales, None, GROUP, packed.shape[0], 2 * packed.shape[1], is_e2m1=True)
        if num_experts and dtype == torch.bfloat16:  # what the kernel of a prepacked weight takes
            weight = ops.repack_expert_int4(weight, num_experts)
        weights.update(weight.tensors())
        return ops.int4_linear_weight(weight, weights.get("bias"), num_experts=num_experts)


class StoredMXFP4(RoundedToMXFP4):
    """Weights that are stored so: blocks of 32 values in 16 bytes, and scales."""

    def checkpoint_tensors(self, spec: LinearSpec, rows: int) -> CheckpointTensors:
        groups = spec.in_features // GROUP
        stored = {
            "blocks": StoredTensor((rows, groups, GROUP // 2), ("U8",), 0, 1, columns_unit=GROUP),
            "scales": StoredTensor((rows, groups), ("U8",), 0, 1, columns_unit=GROUP),
        }
        plain = plain_tensors(spec, rows)
        return {**stored, **{suffix: tensor for suffix, tensor in plain.items() if suffix != "weight"}}

    def load(self, weights: Weights, suffix: str, rows: slice, tensor: Tensor) -> None:
        if suffix == "scales" and bool((tensor > LARGEST_SCALE).any()):
            raise ValueError(f"has a scale above 2^{LARGEST_SCALE - BIAS}")
        stored = {"blocks": "packed"}.get(suffix, suffix)
        weights[stored][rows].copy_(tensor.flatten(1) if suffix == "blocks" else tensor)


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes uint8 [rows, columns], scales uint8 [rows, groups]): a group's largest value becomes 4 to 8 times 2^scale.

    Values above 6 become 6, as section 6.3 of the format's specification has it.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    exponents = torch.frexp(groups.abs().amax(dim=-1)).exponent - 1 - LARGEST_EXPONENT
    exponents = exponents.clamp(-BIAS, LARGEST_SCALE - BIAS)
    scaled = torch.ldexp(groups, -exponents[..., None])
    table = torch.tensor(E2M1, device=weight.device)
    borders = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(scaled.abs().contiguous(), borders) + 8 * scaled.signbit()
    return codes.flatten(1).to(torch.uint8), (exponents + BIAS).to(torch.uint8)


def _read_config(section: HFConfig, modules: Sequence[str]) -> StoredFormat | None:
    """Only the experts of such a checkpoint are stored so, whatever modules_to_not_convert leaves out besides."""
    return StoredFormat(NAME, "block", "scales") if any(".experts." in module for module in modules) else None


register(NAME, RoundedToMXFP4(), 49, lambda stored: StoredMXFP4(), {NAME: _read_config})
