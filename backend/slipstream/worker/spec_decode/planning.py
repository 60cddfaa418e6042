"""What a drafter says of its memory before it is made: sums over its tensors, which the code that makes the real ones
makes on torch's meta device. Engine thread, once at load.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.config import EngineConfig
from slipstream.nn.decoder import Decoder
from slipstream.nn.rotary import table_bytes
from slipstream.nn.spec import DecoderSpec


@dataclass(frozen=True)
class DraftMemory:
    """kv_bytes_per_token: of the drafters' own caches, which have as many blocks as the model's."""

    weight_bytes: int = 0
    kv_bytes_per_token: int = 0

    def __add__(self, other: DraftMemory) -> DraftMemory:
        return DraftMemory(self.weight_bytes + other.weight_bytes, self.kv_bytes_per_token + other.kv_bytes_per_token)


@dataclass(frozen=True)
class Planning:
    """Arguments of DrafterType.planned. target: the model on the meta device."""

    config: EngineConfig
    target: Decoder
    kv_dtype: torch.dtype

    def memory_of(self, tensors: Iterable[Tensor], spec: DecoderSpec | None = None) -> DraftMemory:
        """spec: of the drafter's layers with a KV cache, which has the model's type; None if it has none."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if spec is None:
            return DraftMemory(num_bytes)
        num_bytes += table_bytes(spec.attentions, self.config.model.max_model_len or self.target.spec.max_model_len)
        return DraftMemory(num_bytes, spec.kv_bytes_per_token(self.kv_dtype))
