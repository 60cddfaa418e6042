"""Which rows of a step have which adapter, gathered so that the rows of a tile share one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NO_SLOT = -1
NO_ROW = -1
# Rows of a tile in steps of few and of many tokens: a tensor core takes 16 at least, more read an adapter less often.
FEW_ROWS, MANY_ROWS = 16, 64
MAX_FEW_TOKENS = 512


@dataclass(frozen=True)
class AdapterTiles:
    """slots: [N] int32, the slot whose adapter a tile's rows have, NO_SLOT for a tile without rows.

    rows: [N, tile_rows] int32, contiguous: rows of the step, each in one tile at most, then NO_ROW. A row in none has
    no adapter. N depends on the step's number of tokens alone, so that a captured step serves every mix of adapters.
    """

    slots: torch.Tensor
    rows: torch.Tensor


def tile_rows(num_tokens: int) -> int:
    """Rows of a tile in a step of so many tokens."""
    return FEW_ROWS if num_tokens <= MAX_FEW_TOKENS else MANY_ROWS


def count_tiles(num_tokens: int, num_slots: int) -> int:
    """Tiles that any mix of adapters fits in: each adapter of the step fills its last tile in part only."""
    return min(num_tokens, num_slots) + num_tokens // tile_rows(num_tokens)
