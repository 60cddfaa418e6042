"""Where the tokens of a step are: in their texts, and in a paged cache.  Plain data, made once a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream_kernels.select import require_shape


@dataclass(frozen=True)
class TokenSlots:
    """positions: [num_tokens] int64, each < max_pos.  slot_mapping: [num_tokens] int64, slot = block * block_size +
    offset of a cache; -1 writes nothing.  Slots must be distinct."""

    positions: torch.Tensor
    slot_mapping: torch.Tensor


def check_slots(slots: TokenSlots, num_tokens: int) -> None:
    """Raise ValueError, naming the tensor, unless they are those of so many tokens."""
    for name, numbers in (("positions", slots.positions), ("slot_mapping", slots.slot_mapping)):
        require_shape(name, numbers, (num_tokens,))
        if numbers.dtype != torch.int64:
            raise ValueError(f"{name}: dtype {numbers.dtype}, expected int64")
