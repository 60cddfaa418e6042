"""stage_fp8_keys in Triton-lang: one program per block of 64 tokens and kv head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.triton.interpreter import to_e4m3
from slipstream_kernels.triton.step_kernel import step_kernel


@step_kernel
def _stage_fp8_keys_kernel(
    key_ptr, value_ptr, tables_ptr, seq_lens_ptr, mean_ptr, keys_ptr, values_ptr, table_stride, blocks_of_request,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    request, first = block // blocks_of_request, block % blocks_of_request * ROWS
    seq_len = tl.load(seq_lens_ptr + request)
    if first >= seq_len:
        return
    rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)[None, :]
    tokens = first + rows
    is_row = tokens < seq_len
    table_ptr = tables_ptr + request.to(tl.int64) * table_stride
    cached = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=is_row, other=0).to(tl.int64)
    source = ((cached * NUM_KV_HEADS + head) * BLOCK_SIZE + tokens % BLOCK_SIZE)[:, None] * D + dims
    target = ((block.to(tl.int64) * NUM_KV_HEADS + head) * ROWS + rows)[:, None] * D + dims
    mask = is_row[:, None] & (dims < D)
    k = tl.load(key_ptr + source, mask=mask, other=0.0).to(tl.float32)
    k -= tl.load(mean_ptr + head * D + dims, mask=dims < D, other=0.0)
    k = tl.minimum(tl.maximum(k, -448.0), 448.0)
    # Rows past the sequence become zero: attention multiplies them by a probability of zero.
    inside = dims < D
    tl.store(keys_ptr + target, to_e4m3(tl.where(mask, k, 0.0)), mask=inside)
    v = tl.load(value_ptr + source, mask=mask, other=0.0).to(tl.float32)
    v = tl.minimum(tl.maximum(v, -65504.0), 65504.0)
    tl.store(values_ptr + target, v.to(tl.float16), mask=inside)


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
    if keys.shape[0] == 0:
        return
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    _stage_fp8_keys_kernel[(keys.shape[0], num_kv_heads)](
        key_cache, value_cache, block_tables, seq_lens, key_mean, keys, values, block_tables.stride(0),
        keys.shape[0] // seq_lens.shape[0],
        NUM_KV_HEADS=num_kv_heads, BLOCK_SIZE=block_size, D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        ROWS=keys.shape[2],
    )  # fmt: skip
