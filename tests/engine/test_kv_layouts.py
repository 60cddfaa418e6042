"""Pool, memory plan, offload and compaction walk planes: a layout that no attention has goes through all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from slipstream.core.config import CacheConfig, EngineConfig, ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.core.host_cache import BlockCopies
from slipstream.nn.kv_layout import KVLayout, KVPlane, key_value_layout
from slipstream.nn.layer_spec import AttentionSpec
from slipstream.nn.read_spec import read_spec
from slipstream.worker.hardware import Hardware
from slipstream.worker.kv_cache import Compaction, PlanePool, allocate_planes
from slipstream.worker.kv_offload import HostBlocks
from slipstream.worker.plan_memory import plan_memory
from slipstream_kernels import ops

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 6, 3
ODD = KVLayout((KVPlane("latent", 1, 7, torch.uint8),))  # 21 bytes a block: no whole words
PAIR = key_value_layout(2, 8, torch.int8)


def filled(layouts: list[KVLayout]) -> PlanePool:
    pool = allocate_planes(layouts, NUM_BLOCKS, BLOCK_SIZE, CPU)
    for number, planes in enumerate(pool.planes):
        for tensor in planes.values():
            tensor.copy_(torch.arange(tensor.numel()).remainder(100).add(number).view(tensor.shape))
    return pool


def blocks_of(pool: PlanePool, block: int) -> list[torch.Tensor]:
    return [tensor[block].clone() for planes in pool.planes for tensor in planes.values()]


@pytest.mark.parametrize("layouts", [[ODD], [ODD, PAIR, ODD], [PAIR, PAIR]], ids=["odd", "mixed", "pair"])
def test_the_pool_is_the_sum_of_its_planes(layouts: list[KVLayout]) -> None:
    pool = allocate_planes(layouts, NUM_BLOCKS, BLOCK_SIZE, CPU)
    num_bytes = sum(layout.bytes_per_token for layout in layouts) * NUM_BLOCKS * BLOCK_SIZE
    assert sum(part.nbytes for part in pool.parts) == num_bytes
    tensors = [tensor for planes in pool.planes for tensor in planes.values()]
    assert sum(tensor.nbytes for tensor in tensors) == num_bytes
    assert all(tensor.is_contiguous() and not tensor.any() for tensor in tensors)
    assert [list(planes) for planes in pool.planes] == [[plane.name for plane in one.planes] for one in layouts]
    for part in pool.parts:
        part.fill_(1)  # the same memory
    assert all(tensor.view(torch.uint8).any() for tensor in tensors)


@pytest.mark.parametrize("layouts", [[ODD], [ODD, PAIR, ODD]], ids=["odd", "mixed"])
def test_offload_brings_every_plane_back(layouts: list[KVLayout]) -> None:
    pool = filled(layouts)
    expected = blocks_of(pool, 4)
    host = HostBlocks(pool, 2)
    host.run(BlockCopies(stores=[(4, 1)], loads=[]))
    for planes in pool.planes:
        for tensor in planes.values():
            tensor[4] = 0
    host.run(BlockCopies(stores=[], loads=[(2, 1)]))
    for moved, right in zip(blocks_of(pool, 2), expected):
        assert torch.equal(moved, right)
    assert not any(tensor.any() for tensor in blocks_of(pool, 4))


@pytest.mark.parametrize("layouts", [[ODD], [ODD, PAIR, ODD]], ids=["odd", "mixed"])
def test_compaction_moves_every_plane(layouts: list[KVLayout]) -> None:
    pool, expected = filled(layouts), filled(layouts)
    for planes in expected.planes:
        for tensor in planes.values():
            tensor[1, :, 2] = tensor[3, :, 1]
    kept = ops.empty_accepted_rows(1, CPU)._replace(
        sources=torch.tensor([[3 * BLOCK_SIZE + 1]]),
        targets=torch.tensor([[BLOCK_SIZE + 2]]),
        counts=torch.ones(1, dtype=torch.int32),
    )
    Compaction(pool, CPU).keep(kept)
    for planes, right in zip(pool.planes, expected.planes):
        assert all(torch.equal(planes[name], right[name]) for name in right)


def test_the_plan_is_the_sum_of_planes(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, hardware = read_spec(tiny_llama), Hardware(CPU, torch.float32, torch.float32)
    cache = CacheConfig(block_size=16, num_blocks=64)
    config = EngineConfig(model=ModelConfig(max_model_len=256), cache=cache)
    monkeypatch.setattr(AttentionSpec, "kv_layout", lambda self, dtype: ODD)
    assert plan_memory(spec, config, hardware, 1 << 30).block_bytes == 7 * 16 * spec.num_layers
    state = KVLayout((*ODD.planes, KVPlane("state", 1, 7, torch.float32, per_request=True)))
    monkeypatch.setattr(AttentionSpec, "kv_layout", lambda self, dtype: state)
    with pytest.raises(ConfigError, match="state is kept per request, which the KV pool does not serve"):
        plan_memory(spec, config, hardware, 1 << 30)
