"""stage_fp8 in Triton-lang: one program per block of 64 tokens and kv head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.attention.attention_call import AttentionMetadata
from slipstream_kernels.kv_cache import KvCache
from slipstream_kernels.triton.interpreter import to_e4m3
from slipstream_kernels.triton.step_kernel import step_kernel


@triton.jit
def _load_rows(
    cache_ptr, table_ptr, tokens, seq_len, head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """fp32 rows of a request's tokens, zero past its length."""
    is_row = tokens < seq_len
    block = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=is_row, other=0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)[None, :]
    source = ((block * NUM_KV_HEADS + head) * BLOCK_SIZE + tokens % BLOCK_SIZE)[:, None] * D + dims
    return tl.load(cache_ptr + source, mask=is_row[:, None] & (dims < D), other=0.0).to(tl.float32)


@step_kernel
def _stage_fp8_kernel(
    key_ptr, value_ptr, tables_ptr, seq_lens_ptr, mean_ptr, keys_ptr, values_ptr, table_stride, blocks_of_request,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    HAS_KEYS: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    request, first = block // blocks_of_request, block % blocks_of_request * ROWS
    seq_len = tl.load(seq_lens_ptr + request)
    if first >= seq_len:
        return
    rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    table_ptr = tables_ptr + request.to(tl.int64) * table_stride
    target = (block.to(tl.int64) * NUM_KV_HEADS + head) * ROWS * D
    if HAS_KEYS:
        k = _load_rows(key_ptr, table_ptr, first + rows, seq_len, head, NUM_KV_HEADS, BLOCK_SIZE, D, BLOCK_D)
        inside = (dims < D)[None, :]
        k -= tl.load(mean_ptr + head * D + dims, mask=dims < D, other=0.0)[None, :]
        k = tl.where((first + rows < seq_len)[:, None], tl.minimum(tl.maximum(k, -448.0), 448.0), 0.0)
        tl.store(keys_ptr + target + rows[:, None] * D + dims[None, :], to_e4m3(k), mask=inside)
    # staged_order of stage_fp8.py, read in it, so that whole rows of places are stored.
    within = rows % 32
    order = rows // 32 * 32 + within // 16 * 16 + within % 4 // 2 * 8 + within % 16 // 4 * 2 + within % 2
    v = _load_rows(value_ptr, table_ptr, first + order, seq_len, head, NUM_KV_HEADS, BLOCK_SIZE, D, BLOCK_D)
    v = tl.trans(tl.minimum(tl.maximum(v, -448.0), 448.0))
    tl.store(values_ptr + target + dims[:, None] * ROWS + rows[None, :], to_e4m3(v), mask=(dims < D)[:, None])


def stage_fp8(
    cache: KvCache,
    metadata: AttentionMetadata,
    key_mean: torch.Tensor | None,
    keys: torch.Tensor | None,
    values: torch.Tensor,
) -> None:
    """See ops.stage_fp8."""
    if values.shape[0] == 0:
        return
    num_kv_heads, block_size, head_dim = cache.key.shape[1:]
    tables = metadata.block_tables
    _stage_fp8_kernel[(values.shape[0], num_kv_heads)](
        cache.key, cache.value, tables, metadata.seq_lens, key_mean, keys, values, tables.stride(0),
        values.shape[0] // metadata.num_requests,
        NUM_KV_HEADS=num_kv_heads, BLOCK_SIZE=block_size, D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        ROWS=values.shape[3], HAS_KEYS=keys is not None,
    )  # fmt: skip
