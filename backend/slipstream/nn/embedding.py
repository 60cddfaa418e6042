"""Token embedding table, and the output heads: a separate one, and one tied to the table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.batch import GivenRows
from slipstream.nn.layer_context import LayerContext
from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.linear import Linear
from slipstream.nn.parallel import SINGLE
from slipstream.nn.quant import QuantMethod


class Embedding:
    """token_ids: [T] int64 -> [T, hidden_size]. scale: times what the table has, rounded to the model's dtype."""

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext, scale: float = 1.0) -> None:
        self._scale = torch.tensor(scale, dtype=context.dtype).item()
        self.parallel = context.parallel
        self._rows = context.parallel.vocabulary(vocab_size)
        self.num_rows = vocab_size  # of the table as it is stored
        shape = context.parallel.vocabulary_width(vocab_size), hidden_size
        self.padded = torch.zeros(shape, device=context.device, dtype=context.dtype)  # as a tied head multiplies by it
        self.weight = self.padded[: self._rows.stop - self._rows.start]

    def load(self, tensor: Tensor) -> None:
        """tensor: the whole table, of which a rank takes its rows."""
        self.weight.copy_(tensor[self._rows])

    def __call__(self, token_ids: Tensor, given: GivenRows | None = None) -> Tensor:
        if self.parallel.size == 1:
            embedded = F.embedding(token_ids, self.weight)
        else:
            embedded = self.parallel.sum(self._own(token_ids))
        if given is not None:
            embedded = embedded.index_copy(0, given.rows, given.values)
        return embedded if self._scale == 1.0 else embedded * self._scale

    def _own(self, token_ids: Tensor) -> Tensor:
        """The rows that this rank has, zero for tokens of other ranks."""
        rows = token_ids - self._rows.start
        is_own = (rows >= 0) & (rows < len(self.weight))
        return F.embedding(torch.where(is_own, rows, 0), self.padded) * is_own[:, None]  # it may have no row: padded


@dataclass(frozen=True)
class LogitScale:
    """logits -> soft_cap · tanh(factor · logits / soft_cap), in fp32; without both the logits as they are."""

    factor: float = 1.0
    soft_cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.factor == 1.0 and self.soft_cap is None:
            return logits
        return ops.scale_logits(logits, self.factor, self.soft_cap)


NO_SCALE = LogitScale()


class Head(Linear):
    """Logits by a matrix of its own. spec: of one part, shard "vocabulary"."""

    def __init__(self, spec: LinearSpec, context: LayerContext, scale: LogitScale = NO_SCALE) -> None:
        super().__init__(spec, context)
        self._vocab_size, self._scale = spec.out_features, scale  # without padding

    def __call__(self, x: Tensor) -> Tensor:
        return self._scale(self._parallel.gather_vocabulary(super().__call__(x), self._vocab_size))


class TiedHead:
    """Logits by the embedding table itself: unquantised whatever the method of the linear layers.

    On a GPU it holds no memory of its own; on a CPU it holds a packed copy of the table (see quant/unquantized.py).
    """

    def __init__(self, method: QuantMethod, scale: LogitScale) -> None:
        self._method, self._scale = method, scale
        self._weight: ops.LinearWeight | None = None
        self._parallel, self._vocab_size = SINGLE, 0

    def tie(self, embedding: Embedding) -> None:
        """Call once, when the table is loaded."""
        self._weight = self._method.finish({"weight": embedding.padded})
        self._parallel, self._vocab_size = embedding.parallel, embedding.num_rows

    def __call__(self, x: Tensor) -> Tensor:
        assert self._weight is not None
        return self._scale(self._parallel.gather_vocabulary(ops.linear(x, self._weight), self._vocab_size))
