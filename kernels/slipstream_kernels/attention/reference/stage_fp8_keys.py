"""stage_fp8_keys in plain torch, and the rounding that attention in FP8 does, for the reference of attention."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import E4M3_MAX

LARGEST_FP16 = 65504.0


def stage_fp8_keys(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key_mean: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """See ops.stage_fp8_keys."""
    block_size, (staged_rows, num_requests) = key_cache.shape[2], (keys.shape[2], seq_lens.shape[0])
    blocks_of_request = keys.shape[0] // max(1, num_requests)
    for request, seq_len in enumerate(seq_lens.tolist()):
        positions = torch.arange(seq_len, device=key_cache.device)
        blocks = block_tables[request, positions // block_size].long()
        staged = request * blocks_of_request + positions // staged_rows
        cached = key_cache[blocks, :, positions % block_size].float()
        keys[staged, :, positions % staged_rows] = round_keys(cached, key_mean)
        held = value_cache[blocks, :, positions % block_size].float()
        values[staged, :, positions % staged_rows] = held.clamp(-LARGEST_FP16, LARGEST_FP16).half()


def round_keys(keys: torch.Tensor, key_mean: torch.Tensor) -> torch.Tensor:
    """keys: [..., num_kv_heads, head_dim] fp32 -> the same less the mean, as e4m3."""
    return (keys - key_mean).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def rounded_queries(queries: torch.Tensor) -> torch.Tensor:
    """queries: [..., head_dim] -> fp32, each row rounded to e4m3 by its largest element."""
    rows = queries.float()
    scales = rows.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / E4M3_MAX
    return (rows / scales).to(torch.float8_e4m3fn).float() * scales
