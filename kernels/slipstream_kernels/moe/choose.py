"""choose: the one place that says which kernel multiplies the rows of experts."""

from __future__ import annotations

from functools import lru_cache

import torch

from slipstream_kernels.gemm.product import WeightKind
from slipstream_kernels.kernel_choice import Device, ThisDevice, Variant, config_of
from slipstream_kernels.moe.kernels import KERNELS
from slipstream_kernels.moe.product import Product
from slipstream_kernels.moe.tuning import Use, tuning_of


def choose(product: Product, device: Device[Product]) -> Variant:
    """The first variant of the device's table that takes the product.  Raises ValueError with all reasons if none."""
    weight = product.weight
    reasons = []
    for use in _uses(weight, device.name):
        if product.num_rows < use.least_rows * weight.num_experts or product.num_tokens > use.most_tokens:
            continue
        if weight.in_features < use.least_in_features:
            continue
        config, reason = config_of(use.kernel, KERNELS[use.kernel], product, device)
        if config is not None:
            is_gated = product.gated and KERNELS[use.kernel].gates(product)
            return Variant(use.kernel, config, is_gated, use.quantises)
        reasons.append(f"{use.kernel}: {reason}")
    raise ValueError(f"experts of {weight.format}: {'; '.join(reasons) or f'not multiplied by {weight.rows} rows'}")


def _uses(weight: WeightKind, name: str) -> tuple[Use, ...]:
    if weight.deterministic:
        return (Use("invariant_grouped_mm"),)
    return tuning_of(name).uses.get((weight.format, weight.rows), ())


@lru_cache(maxsize=1 << 14)
def variant_of(product: Product) -> Variant:
    """The choice on the weight's own device, kept."""
    return choose(product, this_device(product.weight.device))


@lru_cache
def this_device(device: torch.device) -> Device[Product]:
    return ThisDevice(device, KERNELS)
