"""compact_kv: the reference against a loop, triton against the reference, for every type of cache."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch
from slipstream_kernels import ops
from slipstream_kernels.kv_cache import FP8_DTYPE, INT4_DTYPE, INT8_DTYPE, KvCache, empty_kv_cache

DTYPES = (torch.float32, torch.bfloat16, FP8_DTYPE, INT8_DTYPE, INT4_DTYPE)
NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, HEAD_DIM = 9, 3, 8, 64


def caches(dtype: torch.dtype, device: torch.device, num_layers: int = 3) -> list[KvCache]:
    generator = torch.Generator().manual_seed(0)
    made = [empty_kv_cache((NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, HEAD_DIM), dtype, device) for _ in range(num_layers)]
    for cache in made:
        for tensor in cache.block_tensors:
            drawn = torch.randint(0, 120, tensor.shape, generator=generator)
            tensor.copy_(drawn.to(torch.float32).to(tensor.dtype))
    return made


def moves(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Per request, sources and targets in two blocks of its own, as accepted branches of a tree move."""
    dice = random.Random(seed)
    sources, targets = [], []
    for request in range(4):
        blocks = [2 * request + 1, 2 * request]
        first = dice.randrange(BLOCK_SIZE)
        rows = sorted(dice.sample(range(1, BLOCK_SIZE), dice.randrange(1, 5)))
        places = [(first + row, first + 1 + place) for place, row in enumerate(rows) if row != place + 1]
        slot = lambda place, blocks=blocks: blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE  # noqa: E731
        sources.append([slot(source) for source, _ in places])
        targets.append([slot(target) for _, target in places])
    return sources, targets


def planes_of(made: list[KvCache]) -> list[torch.Tensor]:
    return [tensor for cache in made for tensor in cache.block_tensors]


def move(made: list[KvCache], seed: int, device: torch.device, backend: str) -> None:
    parts = moves(seed)
    counts = [len(part) for part in parts[0]]
    most = max(counts) + 1  # what stands behind a request's moves is of no meaning
    columns = [
        torch.tensor([part + [0] * (most - len(part)) for part in side], dtype=torch.int64, device=device)
        for side in parts
    ]
    table = ops.slot_table(planes_of(made))
    ops.compact_kv(table, *columns, torch.tensor(counts, dtype=torch.int32, device=device), backend=backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_slots_are_moved_one_after_another(dtype: torch.dtype, seed: int) -> None:
    made, expected = caches(dtype, torch.device("cpu")), caches(dtype, torch.device("cpu"))
    move(made, seed, torch.device("cpu"), "reference")
    moved = 0
    for source, target in ((s, t) for pair in zip(*moves(seed)) for s, t in zip(*pair)):
        moved += 1
        for cache in expected:
            for tensor in cache.block_tensors:
                row = tensor[source // BLOCK_SIZE, :, source % BLOCK_SIZE].clone()
                tensor[target // BLOCK_SIZE, :, target % BLOCK_SIZE] = row
    assert moved > 0
    assert_same(made, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_is_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    made, expected = caches(dtype, device), caches(dtype, device)
    for seed in range(3):
        move(made, seed, device, "triton")
        move(expected, seed, device, "reference")
    assert_same(made, expected)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_planes_of_odd_rows_and_of_other_heads(backend: str, device: torch.device) -> None:
    """One row of seven bytes, and as many bytes in one head and in two."""
    if backend == "reference":
        device = torch.device("cpu")
    shapes = ((9, 1, 4, 7), (9, 2, 4, 8), (9, 1, 4, 8))
    planes = [torch.arange(prod(shape), device=device).to(torch.uint8).view(shape) for shape in shapes]
    expected = [plane.clone() for plane in planes]
    for plane in expected:
        plane[0, :, 2] = plane[8, :, 1]
        plane[0, :, 3] = plane[2, :, 0]
    sources, targets = torch.tensor([[33, 8, 1]], device=device), torch.tensor([[2, 3, 5]], device=device)
    counts = torch.tensor([2], dtype=torch.int32, device=device)
    ops.compact_kv(ops.slot_table(planes), sources, targets, counts, backend=backend)
    for plane, right in zip(planes, expected):
        assert torch.equal(plane, right)


def assert_same(made: list[KvCache], expected: list[KvCache]) -> None:
    for one, other in zip(made, expected):
        for tensor, like in zip(one.block_tensors, other.block_tensors):
            assert torch.equal(tensor.view(torch.uint8), like.view(torch.uint8))


def test_bad_arguments_are_named() -> None:
    table = ops.slot_table(planes_of(caches(torch.float32, torch.device("cpu"))))
    one, counts = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="targets"):
        ops.compact_kv(table, one, torch.zeros(1, 2, dtype=torch.int64), counts)
    with pytest.raises(ValueError, match="counts"):
        ops.compact_kv(table, one, one, torch.zeros(2, dtype=torch.int32))
