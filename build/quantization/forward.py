"""Runs a decoder over windows of text through a paged KV cache of any type, without an engine; yields its logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from slipstream.nn.batch import MAX_DECODE_QUERY_LEN, ForwardBatch
from slipstream.nn.decoder import Decoder
from slipstream.nn.kv_layout import LayerCache
from slipstream.nn.kv_types import resolve_kv_dtype
from slipstream_kernels import ops
from torch import Tensor

BLOCK_SIZE = 64


@dataclass(frozen=True)
class Schedule:
    """batch_windows: windows that run at once. step_tokens: tokens of each in a step; 1 is as in decoding."""

    batch_windows: int = 16
    step_tokens: int = 512


def empty_caches(decoder: Decoder, num_blocks: int, kv_dtype: str) -> list[LayerCache]:
    """One cache per layer. kv_dtype: as kv_cache_dtype in config.pbtxt. Raises ConfigError if it cannot be served."""
    spec, context = decoder.spec, decoder.context
    dtype = resolve_kv_dtype(kv_dtype, spec, context.device, context.dtype, BLOCK_SIZE)
    is_fp8 = dtype == ops.QUANTIZED_KV_DTYPES["fp8_e4m3"]
    caches = []
    for layer in decoder.layers:
        planes = layer.attention.spec.kv_layout(dtype).empty(num_blocks, BLOCK_SIZE, context.device)
        caches.append(layer.attention.spec.kv_cache({**planes, **(layer.attention.kv_scales if is_fp8 else {})}))
    return caches


@torch.inference_mode()
def window_logits(decoder: Decoder, windows: Tensor, kv_dtype: str, schedule: Schedule) -> Iterator[Tensor]:
    """windows: [num_windows, window_tokens] int64 on the CPU -> logits [window_tokens, vocab_size] fp32 of each.

    They stay on the decoder's device.
    """
    window_tokens = windows.shape[1]
    blocks = -(-window_tokens // BLOCK_SIZE)
    caches = empty_caches(decoder, schedule.batch_windows * blocks, kv_dtype)
    for batch in windows.split(schedule.batch_windows):
        batch = batch.to(decoder.context.device)
        parts = []
        for start in range(0, window_tokens, schedule.step_tokens):
            step = window_step(batch, start, min(start + schedule.step_tokens, window_tokens))
            logits = decoder.logits(decoder.forward(step, caches)).float()
            parts.append(logits.view(batch.shape[0], -1, logits.shape[-1]))
        yield from torch.cat(parts, dim=1)


def window_step(windows: Tensor, start: int, end: int) -> ForwardBatch:
    """Tokens start to end of every window [num_windows, window_tokens]; window i owns the i-th run of blocks."""
    num_windows, device, query_len = windows.shape[0], windows.device, end - start
    blocks = -(-windows.shape[1] // BLOCK_SIZE)
    tables = torch.arange(num_windows * blocks, dtype=torch.int32, device=device).view(num_windows, blocks)
    positions = torch.arange(start, end, device=device).repeat(num_windows)
    first_slots = torch.arange(num_windows, device=device) * blocks * BLOCK_SIZE
    is_decode = query_len <= MAX_DECODE_QUERY_LEN
    return ForwardBatch(
        token_ids=windows[:, start:end].reshape(-1),
        positions=positions,
        query_start_loc=torch.arange(num_windows + 1, dtype=torch.int32, device=device) * query_len,
        seq_lens=torch.full((num_windows,), end, dtype=torch.int32, device=device),
        block_tables=tables,
        slot_mapping=positions + first_slots.repeat_interleave(query_len),
        logits_indices=torch.arange(num_windows * query_len, device=device),
        max_query_len=query_len,
        max_seq_len=end,
        num_decode_requests=num_windows if is_decode else 0,
        num_decode_tokens=num_windows * query_len if is_decode else 0,
        max_decode_query_len=query_len if is_decode else 0,
        prompt_prefixes=() if is_decode else (start,) * num_windows,
    )
