"""invariant_head_mm by the library's batched product."""

from __future__ import annotations

from slipstream_kernels.gemm.reference.head_mm import head_mm as invariant_head_mm

__all__ = ["invariant_head_mm"]
