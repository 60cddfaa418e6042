"""Which layers share blocks: KV groups from a model's layers, or the reason why all layers hold every token.

Engine thread, once at load. Plain arithmetic.
"""

from __future__ import annotations

import torch

from slipstream.core.config import EngineConfig
from slipstream.core.drafts import MAX_DRAFT_TOKENS
from slipstream.core.kv_groups import ONE_GROUP, KVGroups, group_layers
from slipstream.nn.spec import DecoderSpec

# Kernels on a GPU read keys in tiles of up to so many tokens, and the first one may begin before the window.
TILE_TOKENS = 192
# Slots past a step's own tokens that drafting takes: the next verification, scratch and spare slots (engine/drafting).
DRAFT_SLOTS = 4 * (1 + MAX_DRAFT_TOKENS)


def plan_groups(
    spec: DecoderSpec, config: EngineConfig, device: torch.device, kv_dtype: torch.dtype, max_model_len: int
) -> tuple[KVGroups, str]:
    """The groups, and why windowed layers hold every token; "" where they do not, and where no layer has a window."""
    windows = [_window(layer.attention.sliding_window, max_model_len) for layer in spec.layers]
    if not any(windows):
        return ONE_GROUP, ""
    refusal = _refusal(spec, config, kv_dtype, windows)
    if refusal:
        return ONE_GROUP, refusal
    num_full, num_windowed, of_layers = group_layers(windows)
    num_kept = max(filter(None, windows)) - 1 + (TILE_TOKENS - 1 if device.type == "cuda" else 0)
    num_step = min(config.scheduler.max_num_batched_tokens, max_model_len)
    num_step += DRAFT_SLOTS if config.speculation.loaded else 0
    return KVGroups(num_full, num_windowed, num_kept, num_step, of_layers), ""


def _window(sliding_window: int | None, max_model_len: int) -> int | None:
    """None where the longest sequence fits into the window."""
    return None if sliding_window is None or sliding_window >= max_model_len else sliding_window


def _refusal(spec: DecoderSpec, config: EngineConfig, kv_dtype: torch.dtype, windows: list[int | None]) -> str:
    if not config.cache.enable_hybrid_kv_cache:
        return "enable_hybrid_kv_cache is off"
    if all(windows):
        return "no layer holds every token, by which blocks are shared and freed"
    if config.cache.host_memory_bytes:
        return "kv_cache_host_memory_bytes keeps blocks of all layers together"
    if len({layer.attention.kv_layout(kv_dtype) for layer in spec.layers}) > 1:
        return "layers keep keys of different shapes"
    return ""
