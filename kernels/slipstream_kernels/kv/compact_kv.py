"""compact_kv: contract and choice.  Makes the cache slots of accepted drafts contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream_kernels.select import require_shape, select


@dataclass(frozen=True)
class SlotTable:
    """All cache tensors grouped by row bytes, with their addresses on the device; made once, because walking some
    hundred tensors takes 1 ms."""

    groups: tuple[SlotGroup, ...]


@dataclass(frozen=True)
class SlotGroup:
    """tensors: [num_blocks, num_heads, block_size, …] each, of row_bytes a slot and head. addresses: [n] int64."""

    tensors: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    row_bytes: int


def slot_table(planes: Sequence[torch.Tensor]) -> SlotTable:
    """planes: [num_blocks, num_heads, block_size, …], contiguous, of one block size, at fixed addresses."""
    alike: dict[tuple[int, int], list[torch.Tensor]] = {}
    for tensor in planes:
        alike.setdefault((tensor.stride(2) * tensor.element_size(), tensor.shape[1]), []).append(tensor)
    return SlotTable(
        tuple(
            SlotGroup(
                tuple(tensors),
                torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64).to(tensors[0].device),
                row_bytes,
            )
            for (row_bytes, _), tensors in sorted(alike.items(), key=lambda item: item[0])
        )
    )


def compact_kv(
    table: SlotTable,
    sources: torch.Tensor,
    targets: torch.Tensor,
    counts: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Copy slot sources[r, i] onto slot targets[r, i] in all planes of the table.

    sources, targets: [num_requests, most] int64, slot = block * block_size + offset.  counts: [num_requests] int32,
    copies per request, made in order.  A request's targets ascend and no target is a later source; requests share no
    slots; a slot may be copied onto itself.
    """
    require_shape("targets", targets, tuple(sources.shape))
    for name, tensor, dtype, num_dims in (
        ("sources", sources, torch.int64, 2),
        ("targets", targets, torch.int64, 2),
        ("counts", counts, torch.int32, 1),
    ):
        if tensor.dim() != num_dims or tensor.dtype != dtype or not tensor.is_contiguous():
            expected = f"contiguous {dtype} of {num_dims} dimensions"
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, expected {expected}")
    require_shape("counts", counts, (sources.shape[0],))
    if not sources.numel():
        return
    implementation = select("kv.compact_kv", backend, sources)
    for group in table.groups:
        implementation.compact_kv(group.tensors, group.addresses, group.row_bytes, sources, targets, counts)
