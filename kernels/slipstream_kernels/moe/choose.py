"""choose: the one place that says which kernel multiplies the rows of experts."""

from __future__ import annotations

from functools import lru_cache

import torch

from slipstream_kernels.cuda.device import count_sms
from slipstream_kernels.moe.kernels import KERNELS
from slipstream_kernels.moe.product import Device, Product, Variant
from slipstream_kernels.moe.tuning import tuning_of


def choose(product: Product, device: Device) -> Variant:
    """The first variant of the device's table that takes the product.  Raises ValueError with all reasons if none."""
    weight = product.weight
    reasons = []
    for use in tuning_of(device.name).uses.get((weight.format, weight.rows), ()):
        if product.num_rows < use.least_rows * weight.num_experts or product.num_tokens > use.most_tokens:
            continue
        reason = device.refusal(use.kernel, product)
        if reason is None:
            return Variant(use.kernel, KERNELS[use.kernel].configure(product, device), use.quantises)
        reasons.append(f"{use.kernel}: {reason}")
    raise ValueError(f"experts of {weight.format}: {'; '.join(reasons) or f'not multiplied by {weight.rows} rows'}")


@lru_cache(maxsize=1 << 14)
def variant_of(product: Product) -> Variant:
    """The choice on the weight's own device, kept."""
    return choose(product, _this_device(product.weight.device))


@lru_cache
def _this_device(device: torch.device) -> Device:
    return _ThisDevice(device)


class _ThisDevice:
    def __init__(self, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self.name = torch.cuda.get_device_name(device) if is_gpu else device.type
        self.num_sms = count_sms(device) if is_gpu else 0

    def refusal(self, kernel: str, product: Product) -> str | None:
        return KERNELS[kernel].refusal(product)
