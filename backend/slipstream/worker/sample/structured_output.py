"""Grammar masks: a bit per token of the vocabulary and row, applied to the logits in one call. Engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from slipstream_kernels import ops

from slipstream.worker.host_copy import pack


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """rows: sampled rows with a mask. bits: [len(rows), vocab / 32] int32. Other rows are not changed.

    dead_rows: rows of drafts that the grammar forbids, or after which it allows no token.
    """

    rows: list[int] = field(default_factory=list)
    bits: np.ndarray = field(default_factory=lambda: np.empty((0, 0), dtype=np.int32))
    dead_rows: list[int] = field(default_factory=list)

    def among(self, rows: Sequence[int]) -> GrammarMasks:
        """The masks by index in `rows`, among which are all that have one."""
        index_of = {row: index for index, row in enumerate(rows)}
        return GrammarMasks([index_of[row] for row in self.rows], self.bits)


class MaskApplier:
    """Sets forbidden logits to -inf. vocab_size: of the model's head, which may have tokens that the tokenizer lacks:
    grammars forbid these."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device

    def apply(self, logits: torch.Tensor, masks: GrammarMasks) -> None:
        """In place, without waiting for the device. logits: [num_rows, vocab] fp32."""
        if masks.rows:
            rows, bits = pack([np.array(masks.rows, np.int64), masks.bits], self._device)
            ops.apply_token_masks(logits[:, : self._vocab_size], rows, bits)

    def warm_up(self, logits: torch.Tensor) -> None:
        """Compile what `apply` runs. logits: [1, vocab] fp32, which stay."""
        self.apply(logits, GrammarMasks([0], np.full((1, -(-self._vocab_size // 32)), -1, np.int32)))
