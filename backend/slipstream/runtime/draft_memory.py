"""What the loaded ways to draft will take of the device, before anything is read: for the memory plan. Arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.core.config import EngineConfig, ModelConfig
from slipstream.nn.checkpoint_path import resolve_checkpoint
from slipstream.nn.heads.tensors import folder_bytes
from slipstream.nn.load import weight_bytes
from slipstream.nn.spec import DecoderSpec, read_spec


@dataclass(frozen=True)
class DraftMemory:
    """kv_bytes_per_token: of the drafters' own caches, which have as many blocks as the model's."""

    weight_bytes: int = 0
    kv_bytes_per_token: int = 0

    def __add__(self, other: DraftMemory) -> DraftMemory:
        return DraftMemory(self.weight_bytes + other.weight_bytes, self.kv_bytes_per_token + other.kv_bytes_per_token)


def draft_memory(config: EngineConfig, spec: DecoderSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> DraftMemory:
    """Of all methods loaded. Raises ConfigError for a draft model that cannot be read."""
    speculation, total = config.speculation, DraftMemory()
    layer = spec.kv_bytes_per_token(kv_dtype) // spec.num_layers
    if config.model.load_format == "null":
        return total
    copy = spec.vocab_size * spec.hidden_size  # of the model's vocabulary matrix, in FP8
    for method in speculation.loaded:
        if method == "draft_model" and speculation.draft_model:
            model = ModelConfig(model=speculation.draft_model)
            own = read_spec(resolve_checkpoint(model.model))
            total += DraftMemory(weight_bytes(model, own, dtype), own.kv_bytes_per_token(dtype))
        elif method == "medusa":
            total += DraftMemory(_head_bytes(speculation.medusa_heads, 4 * spec.vocab_size * spec.hidden_size, dtype))
        elif method == "mtp":
            total += DraftMemory(_head_bytes(speculation.mtp_module, _layer_parameters(spec), dtype) + copy, layer)
        elif method == "eagle":
            total += DraftMemory(_head_bytes(speculation.eagle_head, 2 * _layer_parameters(spec), dtype) + copy, layer)
    return total


def _head_bytes(folder: str, num_parameters: int, dtype: torch.dtype) -> int:
    """Of the files, else of so many parameters (dummies, modules inside the model's own checkpoint)."""
    if folder and Path(folder).is_dir():
        return folder_bytes(Path(folder))
    return num_parameters * dtype.itemsize


def _layer_parameters(spec: DecoderSpec) -> int:
    return sum(linear.num_parameters for linear in spec.layer_linears) + 2 * spec.hidden_size * spec.hidden_size
