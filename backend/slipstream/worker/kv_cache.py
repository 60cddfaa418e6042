"""The KV pool: the planes of every layer's cache, allocated once at load on the model's device. Engine thread.

Knows planes (nn/kv_layout.py) and not what they mean: a block is the same block of every plane of every layer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.core.kv_groups import ONE_GROUP, KVGroups
from slipstream.nn.kv_layout import KVLayout, KVPlane, LayerCache
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.hardware import Hardware
from slipstream.worker.memory_plan import MemoryPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlanePool:
    """planes: of each layer by name, views of one tensor for all planes of a shape.

    parts: the same memory as words [parts of a block, num_blocks, words of a part]: what a block is, layer by layer.
    """

    planes: list[dict[str, Tensor]]
    parts: list[Tensor]


@dataclass(frozen=True)
class KVPool(PlanePool):
    """layers: the planes as attention takes them."""

    layers: list[LayerCache]


def allocate_planes(layouts: Sequence[KVLayout], num_blocks: int, block_size: int, device: torch.device) -> PlanePool:
    """Zeroed planes of layers with these layouts; why zeros: ops.empty_kv_cache."""
    owners: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[int, KVPlane]]] = {}
    for layer, layout in enumerate(layouts):
        for plane in layout.planes:
            owners.setdefault((plane.shape(num_blocks, block_size), plane.dtype), []).append((layer, plane))
    planes: list[dict[str, Tensor]] = [{} for _ in layouts]
    parts = []
    for (shape, dtype), owned in owners.items():
        store = torch.zeros((len(owned), *shape), dtype=dtype, device=device)
        parts.append(_words(store))
        for (layer, plane), tensor in zip(owned, store):
            planes[layer][plane.name] = tensor
    return PlanePool(planes, parts)


def compactions(pool: PlanePool, groups: KVGroups, device: torch.device) -> list[Compaction]:
    """One compaction for each group."""
    if groups.num_groups == 1:
        return [Compaction(pool, device)]
    return [Compaction(pool, device, groups.layers_of(group)) for group in range(groups.num_groups)]


def _words(store: Tensor) -> Tensor:
    """The same memory in the widest words that a block's part is whole in: [parts, num_blocks, words]."""
    parts = store.flatten(2)
    part_bytes = parts.shape[2] * parts.element_size()
    return parts.view(torch.int32 if part_bytes % torch.int32.itemsize == 0 else torch.uint8)


def allocate_pool(
    spec: DecoderSpec,
    hardware: Hardware,
    plan: MemoryPlan,
    head_scales: Sequence[Mapping[str, Tensor]] = (),
    groups: KVGroups = ONE_GROUP,
) -> KVPool:
    """The plan's blocks for every layer, of the type that was resolved.

    groups: layers of different groups share memory, because a block belongs to one group at a time.
    head_scales: of an FP8 cache, by plane and layer, empty where a checkpoint has none.
    """
    layouts = [layer.attention.kv_layout(hardware.kv_dtype) for layer in spec.layers]
    pool = _allocate(layouts, plan.num_blocks, plan.block_size, hardware.device, groups)
    given = [*head_scales, *({} for _ in layouts[len(head_scales) :])]
    num_given = sum(bool(scales) for scales in given)
    if hardware.kv_dtype != ops.QUANTIZED_KV_DTYPES["fp8_e4m3"]:
        given = [{} for _ in layouts]
        if num_given:
            logger.info("the checkpoint has scales for an FP8 KV cache, which kv_cache_dtype=fp8_e4m3 would use")
    else:
        logger.info("FP8 KV cache with the checkpoint's scales in %d of %d layers", num_given, len(layouts))
    caches = [
        layer.attention.kv_cache({**planes, **scales}) for layer, planes, scales in zip(spec.layers, pool.planes, given)
    ]
    return KVPool(pool.planes, pool.parts, caches)


def _allocate(
    layouts: Sequence[KVLayout], num_blocks: int, block_size: int, device: torch.device, groups: KVGroups
) -> PlanePool:
    if groups.num_groups == 1:
        return allocate_planes(layouts, num_blocks, block_size, device)
    pool = allocate_planes(layouts[: groups.num_parts], num_blocks, block_size, device)
    return PlanePool([pool.planes[part] for part in groups.parts], pool.parts)


class Compaction:
    """pool: of the layers whose planes are moved; layers: these only."""

    def __init__(self, pool: PlanePool, device: torch.device, layers: Sequence[int] | None = None) -> None:
        planes = pool.planes if layers is None else [pool.planes[layer] for layer in layers]
        self._table = ops.slot_table([tensor for of_layer in planes for tensor in of_layer.values()])
        self._device = device

    def warm_up(self) -> None:
        """Compile what `keep` runs; nothing is moved."""
        self.keep(ops.empty_accepted_rows(1, self._device))

    def keep(self, kept: ops.AcceptedRows) -> None:
        """Move accepted rows to the slots of their positions."""
        self.move(kept.sources, kept.targets, kept.counts)

    def move(self, sources: Tensor, targets: Tensor, counts: Tensor) -> None:
        """See ops.compact_kv."""
        ops.compact_kv(self._table, sources, targets, counts)
