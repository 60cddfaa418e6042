"""Token embedding table, and the output head that is tied to it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.core.errors import EngineError
from slipstream.nn.layer_context import LayerContext
from slipstream.nn.quant import QuantMethod


class Embedding:
    """token_ids: [T] int64 -> [T, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext) -> None:
        self._rows = context.parallel.vocabulary(vocab_size)
        self.num_rows = vocab_size  # of the table as it is stored
        shape = self._rows.stop - self._rows.start, hidden_size
        self.weight = torch.empty(shape, device=context.device, dtype=context.dtype)

    def load(self, tensor: Tensor) -> None:
        """tensor: the whole table, of which a rank takes its rows."""
        self.weight.copy_(tensor[self._rows])

    def __call__(self, token_ids: Tensor) -> Tensor:
        if len(self.weight) != self.num_rows:
            raise EngineError("a rank of several holds weights, and does not compute yet")
        return F.embedding(token_ids, self.weight)


class TiedHead:
    """Logits by the embedding table itself: unquantised whatever the method of the linear layers.

    On a GPU it holds no memory of its own; on a CPU it holds a packed copy of the table (see quant/unquantized.py).
    """

    def __init__(self, method: QuantMethod) -> None:
        self._method = method
        self._weights: dict[str, Tensor] = {}

    def tie(self, embedding: Embedding) -> None:
        """Call once, when the table is loaded."""
        self._weights = {"weight": embedding.weight}
        self._method.finish(self._weights)

    def __call__(self, x: Tensor) -> Tensor:
        return self._method.apply(self._weights, x)
