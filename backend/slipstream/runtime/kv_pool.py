"""The KV pool: one cache per layer, allocated once at load on the model's device. Engine thread."""

from __future__ import annotations

from slipstream_kernels import ops

from slipstream.nn.attention import LayerCache
from slipstream.nn.spec import DecoderSpec
from slipstream.runtime.memory_plan import Hardware, MemoryPlan


def allocate_pool(spec: DecoderSpec, hardware: Hardware, plan: MemoryPlan) -> list[LayerCache]:
    """The plan's blocks for every layer, of the type that was resolved."""
    shape = (plan.num_blocks, spec.num_kv_heads, plan.block_size, spec.head_dim)
    return [ops.empty_kv_cache(shape, hardware.kv_dtype, hardware.device) for _ in range(spec.num_layers)]
