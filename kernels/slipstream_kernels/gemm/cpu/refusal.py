"""Which weights the CPU's own products take."""

from __future__ import annotations

import torch

from slipstream_kernels.gemm.cpu.int8_mm import MAX_IN_FEATURES, saturates
from slipstream_kernels.gemm.product import WeightKind


def refusal(weight: WeightKind) -> str | None:
    """Why they do not; None if they do."""
    if weight.device.type != "cpu":
        return f"the weight is on {weight.device}"
    if not torch.backends.mkldnn.is_available():
        return "torch has no oneDNN"
    if weight.format == "int8" and saturates():
        return "oneDNN's integer products saturate on this CPU, which has no VNNI"
    if weight.format == "int8" and weight.in_features > MAX_IN_FEATURES:
        return f"in_features: {weight.in_features}, sums of more than {MAX_IN_FEATURES} may overflow"
    return None
