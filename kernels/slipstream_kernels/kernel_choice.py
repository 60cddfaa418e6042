"""What the choices of all families share: a kernel's rules, the device that a choice asks, the variant it returns.

A family has a description of its products and a table of kernels by name (gemm/kernels.py, moe/kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from slipstream_kernels.cuda.device import count_sms

Config = tuple[int, ...]
NO_VARIANT = "has no variant of this size"
P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)
R = TypeVar("R")


class Variant(NamedTuple):
    """A kernel and its template arguments.

    is_gated: it applies the gate as well.  quantises: rows are quantised first; else it takes them as they are.
    """

    kernel: str
    config: Config = ()
    is_gated: bool = False
    quantises: bool = False

    def __str__(self) -> str:
        numbers = ",".join(str(int(number)) for number in self.config)
        return f"{self.kernel}/{numbers}" if numbers else self.kernel


class Device(Protocol[P_contra]):
    """What a choice depends on beside the product.  name: the key of its table of tuning."""

    name: str
    num_sms: int

    def refusal(self, kernel: str, product: P_contra) -> str | None:
        """Why the kernel cannot make the product here; None if it can."""
        ...

    def count_clusters(self, kernel: str, product: P_contra, config: Config) -> int:
        """How many clusters of CTAs of a kernel's variant run at once; 0: it cannot run."""
        ...


def never(product: object) -> bool:
    return False


def always(product: object) -> bool:
    return True


def no_refusal(product: object) -> None:
    return None


@dataclass(frozen=True)
class Kernel(Generic[P, R]):
    """run: computes the product.  refusal: why a product cannot be made, or None.

    configure: the template arguments of a product; None: no variant has its size.  gates: whether the kernel applies
    the gate of a gated product.  count_clusters: as Device has it.
    """

    run: R
    refusal: Callable[[P], str | None] = no_refusal
    configure: Callable[[P, Device[P]], Config | None] = lambda product, device: ()
    gates: Callable[[P], bool] = never
    count_clusters: Callable[[P, Config], int] = lambda product, config: 0


class ThisDevice(Generic[P, R]):
    """A device of this machine, and the kernels of one family on it.  num_sms: 0 if it is no GPU."""

    def __init__(self, device: torch.device, kernels: Mapping[str, Kernel[P, R]]) -> None:
        is_gpu = device.type == "cuda"
        self.name = torch.cuda.get_device_name(device) if is_gpu else device.type
        self.num_sms = count_sms(device) if is_gpu else 0
        self._kernels = kernels

    def refusal(self, kernel: str, product: P) -> str | None:
        return self._kernels[kernel].refusal(product)

    def count_clusters(self, kernel: str, product: P, config: Config) -> int:
        return self._kernels[kernel].count_clusters(product, config) if self.num_sms else 0
