"""absorb_latent by two ops, one after the other."""

from __future__ import annotations

from typing import Any

import torch

from slipstream_kernels.gemm.head_mm import head_mm
from slipstream_kernels.kv.write_latent import write_latent


def absorb_latent(product: tuple[torch.Tensor, ...], written: tuple[Any, ...]) -> None:
    """See ops.absorb_latent.  Arguments of the two, as of both implementations."""
    head_mm(*product)
    write_latent(*written)
