"""gather_latent in Triton-lang: one program per row of the result."""

from __future__ import annotations

import torch
import triton.language as tl

from slipstream_kernels.kv.triton.latent_rows import latent_pointers, latent_shape, load_latents, load_rope_keys
from slipstream_kernels.latent_cache import LatentCache, TokenRanges
from slipstream_kernels.triton.step_kernel import step_kernel


@step_kernel
def _gather_latent_kernel(
    values_ptr, scales_ptr, rope_ptr, values_stride, scales_stride, rope_stride, tables_ptr, first_ptr, lens_ptr,
    starts_ptr, out_ptr, num_requests, table_stride,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    IS_FP8: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row >= tl.load(starts_ptr + num_requests):
        return
    # Of requests without rows, which begin where the next one does, the last is found.
    low, high = num_requests * 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        is_at_or_after = tl.load(starts_ptr + middle) <= row
        low, high = tl.where(is_at_or_after, middle, low), tl.where(is_at_or_after, high, middle)
    indices = row - tl.load(starts_ptr + low) + tl.zeros((1,), tl.int32)
    is_row = indices < tl.load(lens_ptr + low)
    tokens = tl.load(first_ptr + low) + indices
    table_ptr = tables_ptr + low.to(tl.int64) * table_stride
    blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=is_row, other=0)
    slots = blocks.to(tl.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE
    dtype = out_ptr.dtype.element_ty
    out_ptr += row.to(tl.int64) * (RANK + ROPE)
    features, keys = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_P)[None, :]
    c = load_latents(values_ptr, scales_ptr, slots, is_row, values_stride, scales_stride, dtype, RANK, 1, BLOCK_R,
                     IS_FP8)  # fmt: skip
    tl.store(out_ptr + features, c, mask=features < RANK)
    k = load_rope_keys(rope_ptr, slots, is_row, rope_stride, dtype, ROPE, BLOCK_P)
    tl.store(out_ptr + RANK + keys, k, mask=keys < ROPE)


def gather_latent(cache: LatentCache, ranges: TokenRanges, out: torch.Tensor) -> None:
    """See ops.gather_latent."""
    tables = ranges.block_tables
    if out.shape[0] == 0:
        return
    _gather_latent_kernel[(out.shape[0],)](
        *latent_pointers(cache), tables, ranges.first_tokens, ranges.lens, ranges.start_loc, out, tables.shape[0],
        tables.stride(0), **latent_shape(cache), num_warps=1,
    )  # fmt: skip
