"""ActivationQuant: how a linear layer wants its input quantised, and the fused ops that do so where inputs arise.

A norm or an activation asks the layer that reads its result; so quantisation happens once per input, in the kernel
that wrote it, and the decoder knows nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from slipstream_kernels import ops
from torch import Tensor

Activation = Tensor | ops.Fp8Rows | ops.Int8Rows
A = TypeVar("A", bound=Activation)
A_co = TypeVar("A_co", bound=Activation, covariant=True)


class ActivationQuant(Protocol[A_co]):
    """Each function returns rows that layers of this form read; x: [T, size]."""

    def cast(self, x: Tensor) -> A_co:
        """Plain rows in this form."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[A_co, Tensor]:
        """(norm(x + residual) in this form, x + residual)."""
        ...

    def silu_mul(self, x: Tensor) -> A_co:
        """silu(gate) · up of x = [gate, up], in this form."""
        ...


class Plain:
    """Rows as they are."""

    def cast(self, x: Tensor) -> Tensor:
        return x

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return cast("Tensor", ops.rms_norm(x, weight, eps)), x
        return cast("tuple[Tensor, Tensor]", ops.rms_norm(x, weight, eps, residual))

    def silu_mul(self, x: Tensor) -> Tensor:
        return ops.silu_mul(x)


@dataclass(frozen=True)
class Fp8:
    """Rows quantised to e4m3 by the scheme; up to max_plain_rows of them stay as they are.

    Products of so few rows take the time of reading the weight: quantising rows would cost a kernel and gain nothing.
    """

    scheme: ops.Fp8Scheme
    max_plain_rows: int = 0

    def cast(self, x: Tensor) -> Tensor | ops.Fp8Rows:
        return x if x.shape[0] <= self.max_plain_rows else ops.quantize_fp8(x, self.scheme)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None
    ) -> tuple[Tensor | ops.Fp8Rows, Tensor]:
        if x.shape[0] <= self.max_plain_rows:
            return PLAIN.rms_norm(x, weight, eps, residual)
        return ops.rms_norm_fp8(x, weight, eps, residual, self.scheme)

    def silu_mul(self, x: Tensor) -> Tensor | ops.Fp8Rows:
        return ops.silu_mul(x) if x.shape[0] <= self.max_plain_rows else ops.silu_mul_fp8(x, self.scheme)


@dataclass(frozen=True)
class Int8:
    """Rows quantised to int8, per token or by the one scale; up to max_plain_rows stay as they are, as in Fp8."""

    scale: Tensor | None = None
    max_plain_rows: int = 0

    def cast(self, x: Tensor) -> Tensor | ops.Int8Rows:
        return x if x.shape[0] <= self.max_plain_rows else ops.quantize_int8(x, self.scale)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None
    ) -> tuple[Tensor | ops.Int8Rows, Tensor]:
        normed, summed = PLAIN.rms_norm(x, weight, eps, residual)
        return self.cast(normed), summed

    def silu_mul(self, x: Tensor) -> Tensor | ops.Int8Rows:
        return self.cast(ops.silu_mul(x))


PLAIN = Plain()
