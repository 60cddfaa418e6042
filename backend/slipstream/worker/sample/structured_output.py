"""Grammar masks: a bit per token of the vocabulary and row, applied to the logits in one call. Engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """rows: sampled rows with a mask. bits: [len(rows), vocab / 32] int32. Other rows are not changed.

    dead_rows: rows of drafts that the grammar forbids, or after which it allows no token.
    """

    rows: list[int] = field(default_factory=list)
    bits: np.ndarray = field(default_factory=lambda: np.empty((0, 0), dtype=np.int32))
    dead_rows: list[int] = field(default_factory=list)


class MaskApplier:
    """Sets forbidden logits to -inf."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._bitmask = torch.empty(0, 0, dtype=torch.int32)

    def apply(self, logits: torch.Tensor, masks: GrammarMasks) -> None:
        """In place. logits: [num_rows, vocab] fp32."""
        if not masks.rows:
            return
        import xgrammar

        if self._bitmask.shape[0] < logits.shape[0]:
            bitmask = xgrammar.allocate_token_bitmask(max(8, 2 * logits.shape[0]), self._vocab_size)
            self._bitmask = bitmask.pin_memory() if self._device.type == "cuda" else bitmask
        self._bitmask[torch.tensor(masks.rows)] = torch.from_numpy(masks.bits)
        bitmask = self._bitmask[: logits.shape[0]].to(self._device)  # `indices` skips rows with stale bits
        xgrammar.apply_token_bitmask_inplace(logits, bitmask, vocab_size=self._vocab_size, indices=masks.rows)
