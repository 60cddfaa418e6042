"""The KV pool: one cache per layer, allocated once at load on the model's device. Engine thread."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.attention import LayerCache
from slipstream.nn.spec import DecoderSpec
from slipstream.runtime.memory_plan import Hardware, MemoryPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KVPool:
    """layers: a cache per layer, views of one tensor of all keys and values, and of one of all their scales.

    parts: the same memory as int32 [parts of a block, num_blocks, words of a part]: what a block is, layer by layer.
    """

    layers: list[LayerCache]
    parts: list[Tensor]


def allocate_pool(
    spec: DecoderSpec,
    hardware: Hardware,
    plan: MemoryPlan,
    head_scales: Sequence[tuple[Tensor, Tensor] | None] = (),
) -> KVPool:
    """The plan's blocks for every layer, of the type that was resolved, zeroed as ops.empty_kv_cache says why.

    head_scales: of an FP8 cache, keys' and values' layer by layer, where a checkpoint has some.
    """
    shape = (plan.num_blocks, spec.num_kv_heads, plan.block_size, spec.head_dim)
    layer = ops.empty_kv_cache(shape, hardware.kv_dtype, torch.device("meta"))
    stores = [_store(layer.key, spec, hardware)]
    if len(layer.block_tensors) > 2:
        assert layer.key_scale is not None
        stores.append(_store(layer.key_scale, spec, hardware))
    fields = (("key", "value"), ("key_scale", "value_scale"))
    layers = [
        replace(
            layer, **{name: store[2 * i + k] for store, names in zip(stores, fields) for k, name in enumerate(names)}
        )
        for i in range(spec.num_layers)
    ]
    given = {i: scales for i, scales in enumerate(head_scales) if scales is not None}
    if hardware.kv_dtype == ops.QUANTIZED_KV_DTYPES["fp8_e4m3"]:
        for i, (key_scale, value_scale) in given.items():
            layers[i] = replace(layers[i], key_scale=key_scale, value_scale=value_scale)
        logger.info("FP8 KV cache with the checkpoint's scales in %d of %d layers", len(given), spec.num_layers)
    elif given:
        logger.info("the checkpoint has scales for an FP8 KV cache, which kv_cache_dtype=fp8_e4m3 would use")
    return KVPool(layers, [store.flatten(2).view(torch.int32) for store in stores])


def _store(like: Tensor, spec: DecoderSpec, hardware: Hardware) -> Tensor:
    """A tensor for keys and one for values of every layer, as one."""
    return torch.zeros((2 * spec.num_layers, *like.shape), dtype=like.dtype, device=hardware.device)
