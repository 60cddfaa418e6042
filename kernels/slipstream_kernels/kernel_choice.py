"""What the choices of all families share: a kernel's rules, the device that a choice asks, the variant it returns.

A family has a description of its products and a table of kernels by name (gemm/kernels.py, moe/kernels.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from slipstream_kernels.cuda.build import KernelBuildError
from slipstream_kernels.cuda.device import count_sms

LOG = logging.getLogger(__name__)
Config = tuple[int, ...]
NO_VARIANT = "has no variant of this size"


class Weight(Protocol):
    @property
    def format(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...


class AnyProduct(Protocol):
    """What the products of all families have."""

    @property
    def weight(self) -> Weight: ...
    @property
    def dtype(self) -> torch.dtype: ...


P = TypeVar("P", bound=AnyProduct)
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

    def give_up(self, kernel: str, product: P_contra, error: KernelBuildError) -> str:
        """From now on refuse products of this kind for the kernel.  Returns the reason."""
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
        self._given_up: dict[tuple[object, ...], str] = {}  # why, by kernel, weights and rows

    def refusal(self, kernel: str, product: P) -> str | None:
        return self._given_up.get(_kind(kernel, product)) or self._kernels[kernel].refusal(product)

    def give_up(self, kernel: str, product: P, error: KernelBuildError) -> str:
        weight = product.weight
        LOG.warning(
            "kernel %s of %s weights (%s) and %s rows: %s; another kernel, which is slower, takes its place",
            kernel, weight.format, weight.dtype, product.dtype, error,
        )  # fmt: skip
        return self._given_up.setdefault(_kind(kernel, product), "it cannot be built or loaded here; the log says why")

    def count_clusters(self, kernel: str, product: P, config: Config) -> int:
        return self._kernels[kernel].count_clusters(product, config) if self.num_sms else 0


def _kind(kernel: str, product: AnyProduct) -> tuple[object, ...]:
    """What shares a library: other sizes would fail alike, other types need not."""
    return kernel, product.weight.format, product.weight.dtype, product.dtype


def config_of(name: str, kernel: Kernel[P, R], product: P, device: Device[P]) -> tuple[Config | None, str]:
    """(template arguments of a product, or None; why None)"""
    reason = device.refusal(name, product)
    if reason is not None:
        return None, reason
    try:
        return kernel.configure(product, device), NO_VARIANT
    except KernelBuildError as error:  # some build their libraries to see how many CTAs run at once
        return None, device.give_up(name, product, error)
