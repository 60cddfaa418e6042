"""Properties of a GPU that the host part of a kernel needs at every call, queried once per device."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache
def is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def hopper_refusal(device: torch.device, what: str) -> str | None:
    """Why kernels for Hopper cannot run on `device`; None if they can.  what: begins the answer, as in "x is"."""
    if device.type != "cuda":
        return f"{what} on {device}"
    return None if is_hopper(device) else "the GPU is not a Hopper (compute capability 9.0)"


@lru_cache
def count_sms(device: torch.device) -> int:
    """1 on a CPU, where the interpreter runs programs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
