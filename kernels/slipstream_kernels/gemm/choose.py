"""choose: the one place that says which kernel multiplies a dense product.

A pure function of the product and the device: the tables of gemm/tuning.py in order, less what kernels refuse.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from slipstream_kernels.gemm import tuning
from slipstream_kernels.gemm.kernels import KERNELS
from slipstream_kernels.gemm.product import PLAIN_ROWS, Product, WeightKind
from slipstream_kernels.kernel_choice import Device, ThisDevice, Variant, config_of


def choose(product: Product, device: Device[Product]) -> Variant:
    """The first variant of the device's table that takes the product.

    A gated product that no kernel makes in one launch is chosen for as a plain one; the variant says so.  Raises
    ValueError with every kernel's reason where none takes it.
    """
    reasons = []
    for use in _uses(product, device.name):
        kernel = KERNELS[use.kernel]
        if not use.covers(product) or (product.gated and not kernel.gates(product)):
            continue
        config, reason = config_of(use.kernel, kernel, product, device)
        if config is not None:
            return Variant(use.kernel, config, product.gated)
        reasons.append(f"{use.kernel}: {reason}")
    if product.gated:
        return choose(product._replace(gated=False), device)
    raise ValueError(f"{product.rows} rows of {product.dtype}: {'; '.join(reasons)}")


def _uses(product: Product, name: str) -> tuple[tuning.Use, ...]:
    if product.weight.deterministic:
        return (tuning.Use("invariant_mm"),)
    uses = tuning.tuning_of(name).uses.get((product.weight.format, product.rows))
    if uses is None:
        raise ValueError(f"weight: one of {product.weight.format} is not multiplied by {product.rows} rows")
    return uses


@lru_cache(maxsize=1 << 14)
def variant_of(product: Product) -> Variant:
    """The choice on the weight's own device, kept: steps have the same products again and again."""
    return choose(product, this_device(product.weight.device))


def plain_rows_of(weight: WeightKind, most: int, device: Device[Product] | None = None) -> int:
    """Up to how many rows, and no more than `most`, the weight is multiplied by rows that are not quantised.

    device: None: the weight's own.
    """
    product = Product(weight, most, PLAIN_ROWS, torch.bfloat16)
    device = device or this_device(weight.device)
    if not device.num_sms or device.refusal("skinny_gemm", product) is not None:
        return 0
    is_faster_in_fp8 = weight.format == "fp8" and any(
        case.holds(product) for case in tuning.tuning_of(device.name).always_fp8
    )
    return 0 if is_faster_in_fp8 and device.refusal("swap_ab_gemm", product) is None else most


@lru_cache
def this_device(device: torch.device) -> Device[Product]:
    return ThisDevice(device, KERNELS)
