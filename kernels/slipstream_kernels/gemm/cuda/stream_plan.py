"""How the streaming products (swap_ab_stream, stream_w4a16) share their work out, and what shared tiles need."""

from __future__ import annotations

from typing import NamedTuple

import torch

UNIT_ROWS, MAX_UNITS = 16, 8  # weight rows of a unit, units of a tile
TILE_COUNTERS = 4  # of a tile that CTAs share


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

    def split_workspace(
        self, counters: torch.Tensor | None, device: torch.device
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(partial sums, counters) of one call; nothing where no tile is shared.

        counters: int32 zeros, which no other stream uses at the time; each call leaves them zero.  None: made here.
        Raises ValueError if there are fewer than TILE_COUNTERS a tile.
        """
        if not self.is_split:
            return None, None
        # Of the caching allocator: each stream, and each pool of graphs, has its own.
        partial_sums = torch.empty(2 * self.num_ctas * self.slot_floats, device=device)
        if counters is None:
            counters = torch.zeros(TILE_COUNTERS * self.num_tiles, dtype=torch.int32, device=device)
        if counters.numel() < TILE_COUNTERS * self.num_tiles:
            raise ValueError(
                f"counters: {counters.numel()}, expected {TILE_COUNTERS} for each of {self.num_tiles} tiles"
            )
        return partial_sums, counters


def sums_bytes(columns: int, num_sms: int) -> int:
    """The most that partial sums of a product take, with tiles of up to so many tokens."""
    return 2 * num_sms * Plan(columns, 1, 2).slot_floats * torch.float32.itemsize
