"""ActivationQuant: how a weight wants its input quantised, and the fused ops that do so where inputs arise.

A norm or an activation asks the layer that reads its result.  So an input is quantised once, by the kernel that writes
it, and whether so few rows are worth quantising is decided here, beside the choice of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from torch import Tensor

from slipstream_kernels.fp8 import Fp8Rows, Fp8Scheme
from slipstream_kernels.gemm.quantize_fp8 import quantize_fp8
from slipstream_kernels.gemm.quantize_int8 import quantize_int8
from slipstream_kernels.integer import Int8Rows
from slipstream_kernels.norm.gated_mul import gated_mul
from slipstream_kernels.norm.gated_mul_fp8 import gated_mul_fp8
from slipstream_kernels.norm.rms_norm import rms_norm
from slipstream_kernels.norm.rms_norm_fp8 import rms_norm_fp8

Activation = Tensor | Fp8Rows | Int8Rows
A = TypeVar("A", bound=Activation)
A_co = TypeVar("A_co", bound=Activation, covariant=True)


class ActivationQuant(Protocol[A_co]):
    """Each function returns rows that layers of this form read; x: [T, size]."""

    @property
    def traits(self) -> tuple[object, ...]:
        """What decides its kernels beside the sizes of x, comparable."""
        ...

    def cast(self, x: Tensor) -> A_co:
        """Plain rows in this form."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[A_co, Tensor]:
        """(norm(x + residual) in this form, x + residual)."""
        ...

    def gated_mul(self, x: Tensor, activation: str) -> A_co:
        """activation(gate) · up of x = [gate, up], in this form; activation: silu or gelu_tanh."""
        ...


class Plain:
    """Rows as they are."""

    @property
    def traits(self) -> tuple[object, ...]:
        return ()

    def cast(self, x: Tensor) -> Tensor:
        return x

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return cast("Tensor", rms_norm(x, weight, eps)), x
        return cast("tuple[Tensor, Tensor]", rms_norm(x, weight, eps, residual))

    def gated_mul(self, x: Tensor, activation: str) -> Tensor:
        return gated_mul(x, activation)


@dataclass(frozen=True)
class Fp8:
    """Rows quantised to e4m3 by the scheme; up to max_plain_rows of them stay as they are.

    Products of so few rows take the time of reading the weight: quantising rows would cost a kernel and gain nothing.
    """

    scheme: Fp8Scheme
    max_plain_rows: int = 0

    @property
    def traits(self) -> tuple[object, ...]:
        is_static = self.scheme.scale is not None
        sums = self.scheme.sum_columns, self.scheme.summed_rows
        return "fp8", self.scheme.group_size, *sums, is_static, self.max_plain_rows

    def cast(self, x: Tensor) -> Tensor | Fp8Rows:
        return x if x.shape[0] <= self.max_plain_rows else quantize_fp8(x, self.scheme)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None
    ) -> tuple[Tensor | Fp8Rows, Tensor]:
        if x.shape[0] <= self.max_plain_rows:
            return PLAIN.rms_norm(x, weight, eps, residual)
        return rms_norm_fp8(x, weight, eps, residual, self.scheme)

    def gated_mul(self, x: Tensor, activation: str) -> Tensor | Fp8Rows:
        if x.shape[0] <= self.max_plain_rows:
            return gated_mul(x, activation)
        return gated_mul_fp8(x, activation, self.scheme)


@dataclass(frozen=True)
class Int8:
    """Rows quantised to int8, per token or by the one scale; up to max_plain_rows stay as they are, as in Fp8."""

    scale: Tensor | None = None
    max_plain_rows: int = 0

    @property
    def traits(self) -> tuple[object, ...]:
        return "int8", self.scale is not None, self.max_plain_rows

    def cast(self, x: Tensor) -> Tensor | Int8Rows:
        return x if x.shape[0] <= self.max_plain_rows else quantize_int8(x, self.scale)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None
    ) -> tuple[Tensor | Int8Rows, Tensor]:
        normed, summed = PLAIN.rms_norm(x, weight, eps, residual)
        return self.cast(normed), summed

    def gated_mul(self, x: Tensor, activation: str) -> Tensor | Int8Rows:
        return self.cast(gated_mul(x, activation))


PLAIN = Plain()
