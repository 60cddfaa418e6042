"""What the loaded ways to draft will take of the device, before anything is read: for the memory plan. Arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from slipstream.core.config import EngineConfig, ModelConfig
from slipstream.core.errors import naming
from slipstream.nn.checkpoint_path import resolve_checkpoint
from slipstream.nn.heads.planned_bytes import BesideModel, HeadBytes, eagle_bytes, medusa_bytes, mtp_bytes
from slipstream.nn.load import resolve_dtype, weight_bytes
from slipstream.nn.quant import choose_methods
from slipstream.nn.spec import DecoderSpec, read_spec
from slipstream.runtime.head_files import read_head


@dataclass(frozen=True)
class DraftMemory:
    """kv_bytes_per_token: of the drafters' own caches, which have as many blocks as the model's."""

    weight_bytes: int = 0
    kv_bytes_per_token: int = 0

    def __add__(self, other: DraftMemory) -> DraftMemory:
        return DraftMemory(self.weight_bytes + other.weight_bytes, self.kv_bytes_per_token + other.kv_bytes_per_token)


def draft_memory(
    config: EngineConfig, spec: DecoderSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> DraftMemory:
    """Of all methods loaded. Raises ConfigError for a drafter whose files cannot be read."""
    total = DraftMemory()
    if config.model.load_format == "null":
        return total
    model = BesideModel(spec, choose_methods(config.model, spec), device, dtype)
    for method in config.speculation.loaded:
        if method == "draft_model" and config.speculation.draft_model:
            total += _of_draft_model(config, device)
        else:
            head = _head_bytes(method, config, model)
            per_token = head.layer.kv_bytes_per_token(kv_dtype) if head.layer is not None else 0
            total += DraftMemory(head.weights, per_token)
    return total


def _of_draft_model(config: EngineConfig, device: torch.device) -> DraftMemory:
    """Its cache is of its own type."""
    model = ModelConfig(model=config.speculation.draft_model)
    with naming("draft_model"):
        spec = read_spec(resolve_checkpoint(model.model))
        dtype = resolve_dtype(config.model.dtype, spec, device)
        return DraftMemory(weight_bytes(model, spec, dtype), spec.kv_bytes_per_token(dtype))


def _head_bytes(method: str, config: EngineConfig, model: BesideModel) -> HeadBytes:
    planned = {"medusa": medusa_bytes, "mtp": mtp_bytes, "eagle": eagle_bytes}.get(method)
    return HeadBytes(0) if planned is None else read_head(config, method, partial(planned, model))
