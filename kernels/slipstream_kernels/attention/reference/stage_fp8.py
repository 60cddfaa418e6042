"""stage_fp8 in plain torch, and the rounding that attention in FP8 does, for the reference of attention."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.attention_call import AttentionMetadata
from slipstream_kernels.attention.stage_fp8 import STAGED_ROWS, staged_order
from slipstream_kernels.fp8 import E4M3_MAX
from slipstream_kernels.kv_cache import FP8_DTYPE, KvCache

# What probabilities are multiplied by before they are rounded: those of 2^-17 of a row's largest do not vanish.
PROBS_SCALE = 256.0


def stage_fp8(
    cache: KvCache,
    metadata: AttentionMetadata,
    key_mean: torch.Tensor | None,
    keys: torch.Tensor | None,
    values: torch.Tensor,
) -> None:
    """See ops.stage_fp8."""
    block_size, device = cache.block_size, cache.key.device
    blocks_of_request = values.shape[0] // max(1, metadata.num_requests)
    order = staged_order(values.device)
    for request, seq_len in enumerate(metadata.seq_lens.tolist()):
        positions = torch.arange(seq_len, device=device)
        blocks = metadata.block_tables[request, positions // block_size].long()
        own = slice(request * blocks_of_request, request * blocks_of_request + -(-seq_len // STAGED_ROWS))
        held = cache.value.view(torch.uint8) if cache.dtype == FP8_DTYPE else cache.value
        rows = held[blocks, :, positions % block_size]
        rows = rows.view(FP8_DTYPE) if cache.dtype == FP8_DTYPE else to_e4m3(rows)
        values[own] = _in_blocks(rows)[:, order].permute(0, 2, 3, 1).view(FP8_DTYPE)
        if keys is not None and key_mean is not None:
            cached = cache.key[blocks, :, positions % block_size].float()
            keys[own] = _in_blocks(to_e4m3(cached - key_mean)).transpose(1, 2).view(FP8_DTYPE)


def _in_blocks(rows: torch.Tensor) -> torch.Tensor:
    """e4m3 [tokens, num_kv_heads, head_dim] -> bytes [blocks, 64, num_kv_heads, head_dim], zero past the tokens."""
    num_blocks = -(-rows.shape[0] // STAGED_ROWS)
    blocks = torch.zeros((num_blocks * STAGED_ROWS, *rows.shape[1:]), dtype=torch.uint8, device=rows.device)
    blocks[: rows.shape[0]] = rows.view(torch.uint8)
    return blocks.view(num_blocks, STAGED_ROWS, *rows.shape[1:])


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Numbers beyond the range become the largest."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(FP8_DTYPE)


def rounded_queries(queries: torch.Tensor) -> torch.Tensor:
    """queries: [..., head_dim] -> fp32, each row rounded to e4m3 by its largest element."""
    rows = queries.float()
    scales = rows.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / E4M3_MAX
    return (rows / scales).to(FP8_DTYPE).float() * scales


def attend_rounded(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """fp32 scores [..., queries, keys], -inf where hidden, values [..., keys, head_dim] -> [..., queries, head_dim].

    Probabilities are rounded relative to their row's largest, and divided by the sum of what they were.
    """
    probs = torch.exp(scores - scores.amax(dim=-1, keepdim=True)) * PROBS_SCALE
    return torch.matmul(probs.to(FP8_DTYPE).float(), values) / probs.sum(dim=-1, keepdim=True)
