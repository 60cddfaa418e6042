"""move_slots: contract and choice.  Bring the cached keys and values of accepted drafts into line."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream_kernels.kv_cache import KvCache
from slipstream_kernels.ops.select import require_shape, select


def move_slots(
    caches: Sequence[KvCache],
    sources: torch.Tensor,
    targets: torch.Tensor,
    starts: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Copy slot sources[i] onto slot targets[i] in every layer's cache: keys, values and their scales, of any type.

    caches: of layers of one shape and type.  sources, targets: [num_moves] int64, slot = block * block_size + offset.
    starts: [num_requests + 1] int32: moves of one request, in order, are starts[r] to starts[r + 1].  A request's moves
    go towards its beginning (its targets ascend, and no target is a later source), and no two requests share a slot.
    """
    require_shape("targets", targets, tuple(sources.shape))
    for name, tensor, dtype in (
        ("sources", sources, torch.int64),
        ("targets", targets, torch.int64),
        ("starts", starts, torch.int32),
    ):
        if tensor.dim() != 1 or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, expected contiguous {dtype} [n]")
    if not caches or not sources.numel():
        return
    tensors = [tensor for cache in caches for tensor in cache.block_tensors]
    select("move_slots", backend, sources).move_slots(tensors, sources, targets, starts)
