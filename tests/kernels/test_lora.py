"""lora_shrink, lora_expand: right against fp64 for mixes of adapters, ranks, parts; rows of none stay as they are."""

from __future__ import annotations

import pytest
import torch
from lora_tiles import tiles_of
from slipstream_kernels import ops
from tolerances import ELEMENTWISE

BACKENDS = ["reference", "triton"]
NUM_SLOTS = 3


def mixed(num_tokens: int, *, every: int = 2) -> list[int]:
    """Rows of three adapters and of none, in no order."""
    return [(token * 7 + token // every) % (NUM_SLOTS + 1) - 1 for token in range(num_tokens)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("slots", "rank", "in_features", "parts", "dtype"),
    [
        (mixed(37), 6, 1100, [40, 24, 24], torch.float32),
        (mixed(5), 16, 48, [24], torch.bfloat16),
        (mixed(20), 72, 700, [200, 130], torch.bfloat16),
        ([ops.NO_SLOT] * 4, 8, 64, [32], torch.float16),
        ([2] * 33, 8, 520, [16, 16, 16, 17], torch.float16),
        (mixed(530, every=90), 4, 40, [24, 8], torch.float32),
    ],
)
def test_products_of_adapters(
    device: torch.device,
    backend: str,
    slots: list[int],
    rank: int,
    in_features: int,
    parts: list[int],
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(device, dtype)

    x, y = drawn(len(slots), in_features), drawn(len(slots), sum(parts))
    a = drawn(len(parts), NUM_SLOTS, rank, in_features, scale=in_features**-0.5)
    b = drawn(NUM_SLOTS, rank, sum(parts))
    tiles = tiles_of(slots, NUM_SLOTS, device)
    expected = y.double()
    for token, slot in enumerate(slots):
        if slot != ops.NO_SLOT:
            inner = (x[token].double() @ a[:, slot].double().transpose(1, 2)).to(dtype).double()
            of_parts = [h @ part for h, part in zip(inner, b[slot].double().split(parts, dim=1))]
            expected[token] += torch.cat(of_parts)
    before = y.clone()
    inner = ops.lora_shrink(x, a, tiles, backend=backend)
    assert ops.lora_expand(y, inner, b, tiles, parts, backend=backend) is y
    rtol, atol = ELEMENTWISE[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=4 * atol * rank**0.5)
    without = torch.tensor(slots, device=device) == ops.NO_SLOT
    assert torch.equal(y[without], before[without])


def test_tiles_hold_every_row_once() -> None:
    slots = mixed(700, every=3)
    tiles = tiles_of(slots, NUM_SLOTS, torch.device("cpu"))
    assert tiles.rows.shape == (ops.count_tiles(700, NUM_SLOTS), ops.tile_rows(700))
    held = [
        (row, slot)
        for slot, rows in zip(tiles.slots.tolist(), tiles.rows.tolist())
        for row in rows
        if row != ops.NO_ROW
    ]
    assert sorted(held) == [(row, slot) for row, slot in enumerate(slots) if slot != ops.NO_SLOT]


def test_what_is_refused() -> None:
    x, y = torch.zeros(4, 8), torch.zeros(4, 6)
    a, b = torch.zeros(2, NUM_SLOTS, 2, 8), torch.zeros(NUM_SLOTS, 2, 6)
    tiles = tiles_of([0, 1, 2, 0], NUM_SLOTS, x.device)
    inner = ops.lora_shrink(x, a, tiles)
    with pytest.raises(ValueError, match="a: must be contiguous and"):
        ops.lora_shrink(x, a.half(), tiles)
    with pytest.raises(ValueError, match="x: shape"):
        ops.lora_shrink(x[:, :7], a, tiles)
    for parts in ([6, 1], [2, 1, 1, 1, 1]):
        with pytest.raises(ValueError, match="part_sizes: "):
            ops.lora_expand(y, inner, b, tiles, parts)
    with pytest.raises(ValueError, match="inner: shape"):
        ops.lora_expand(y, inner[:, :1], b, tiles, [4, 2])
