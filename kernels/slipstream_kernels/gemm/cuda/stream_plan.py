"""How streaming products (swap_ab_stream, stream_w4a16, stream_w4a8) share their work out; what shared tiles need."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

UNIT_ROWS, MAX_UNITS = 16, 8  # weight rows of a unit, units of a tile of most products
TILE_COUNTERS = 4  # of a tile that CTAs share
COUNTER_ROWS = 4  # a 4-bit weight comes with a counter for so many rows


class Plan(NamedTuple):
    """columns: tokens of a tile.  num_tiles: of weight rows, of equal size, times token_tiles, those of tokens.

    num_ctas: they share the chunks of 128 summed columns of all tiles evenly.
    """

    columns: int
    num_tiles: int
    num_ctas: int
    token_tiles: int = 1

    @property
    def is_split(self) -> bool:
        """Whether CTAs share tiles, and add their sums through memory."""
        return self.num_tiles % self.num_ctas != 0

    @property
    def slot_floats(self) -> int:
        """Sums of a tile, which a CTA writes for others to add."""
        return MAX_UNITS * UNIT_ROWS * self.columns


class Shared(Protocol):
    """What plans of all streaming products have, as Plan has it."""

    @property
    def num_tiles(self) -> int: ...
    @property
    def num_ctas(self) -> int: ...
    @property
    def is_split(self) -> bool: ...
    @property
    def slot_floats(self) -> int: ...


def split_workspace(
    plan: Shared, counters: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(partial sums, counters) of one call; nothing where no tile is shared.

    counters: int32 zeros, which no other stream uses at the time; each call leaves them zero.  None: made here.
    Raises ValueError if there are fewer than TILE_COUNTERS a tile.
    """
    if not plan.is_split:
        return None, None
    # From the caching allocator: each stream, and each pool of graphs, has its own.
    partial_sums = torch.empty(2 * plan.num_ctas * plan.slot_floats, device=device)
    if counters is None:
        counters = torch.zeros(TILE_COUNTERS * plan.num_tiles, dtype=torch.int32, device=device)
    if counters.numel() < TILE_COUNTERS * plan.num_tiles:
        raise ValueError(f"counters: {counters.numel()}, expected {TILE_COUNTERS} for each of {plan.num_tiles} tiles")
    return partial_sums, counters


def sums_bytes(columns: int, num_sms: int, tile_rows: int = MAX_UNITS * UNIT_ROWS) -> int:
    """The most that partial sums of a product take, with tiles of up to so many tokens and weight rows."""
    return 2 * num_sms * tile_rows * columns * torch.float32.itemsize
