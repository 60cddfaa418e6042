"""absorb_latent in Triton-lang, for few tokens: programs of queries' products, behind them those of write_latent."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.gemm.triton.head_mm import load_tile, multiply_tile, tiles_of
from slipstream_kernels.kv.triton.write_latent import load_norm, write_tile, written_shape
from slipstream_kernels.latent_cache import LatentCache, StepLatents
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.step_kernel import step_kernel


@step_kernel
def _absorb_latent_kernel(
    x_ptr, keys_ptr, out_ptr, q_token_stride, q_head_stride, keys_head_stride, keys_feature_stride, keys_column_stride,
    out_token_stride, out_head_stride, num_tokens, in_features, num_pairs, q_ptr, q_out_ptr, latent_ptr, norm_ptr,
    positions_ptr, slot_mapping_ptr, cos_sin_ptr, values_ptr, scales_ptr, rope_ptr, latent_stride, values_stride,
    scales_stride, rope_stride, eps,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, IS_FP8: tl.constexpr, INTERLEAVED: tl.constexpr,
    PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: num_pairs programs as of head_mm, then write_latent's tiles of one token after the other."""
    start_dependents(DEPENDENT)
    place = tl.program_id(0)
    is_product = place < num_pairs
    blocks: tl.constexpr = (RANK + BLOCK_N - 1) // BLOCK_N
    block, head, tile = place % blocks, place // blocks % NUM_HEADS, place // (blocks * NUM_HEADS)
    weight = load_tile(keys_ptr, keys_head_stride, keys_feature_stride, keys_column_stride, head, block,
                       tl.where(is_product, RANK, 0), in_features, PADDED, BLOCK_N)  # fmt: skip
    num_parts: tl.constexpr = 1 + (NUM_HEADS + HEADS - 1) // HEADS
    written = tl.maximum(place - num_pairs, 0).to(tl.int64)
    token, part = written // num_parts, written % num_parts
    slot = tl.load(slot_mapping_ptr + token)
    angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF)
    norm = load_norm(norm_ptr, RANK, GROUPS, COLUMNS, GROUP)
    await_previous(DEPENDENT)
    if is_product:
        multiply_tile(x_ptr, weight, out_ptr, q_token_stride, q_head_stride, out_token_stride, out_head_stride, head,
                      block, tile * BLOCK_M, num_tokens, RANK, in_features, PADDED, BLOCK_M, BLOCK_N)  # fmt: skip
    else:
        write_tile(
            q_ptr, q_out_ptr, latent_ptr, norm, values_ptr, scales_ptr, rope_ptr, q_token_stride, q_head_stride,
            out_token_stride, out_head_stride, latent_stride, values_stride, scales_stride, rope_stride, eps, token,
            part, slot, angles_ptr, NUM_HEADS, HEADS, RANK, GROUPS, COLUMNS, GROUP, HALF, HALF_PADDED, IS_FP8,
            INTERLEAVED,
        )  # fmt: skip


def absorb_latent(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    weight: torch.Tensor,
    latents: StepLatents,
    cache: LatentCache,
    absorbed: torch.Tensor,
) -> None:
    """See ops.absorb_latent.  weight: as ops.head_mm takes it.  absorbed: written."""
    num_tokens, num_heads, in_features = q_nope.shape
    if not num_tokens:
        return
    tiles, shape = tiles_of(num_tokens, weight), written_shape(num_heads, latents.rope, cache)
    num_parts = 1 + triton.cdiv(num_heads, shape["HEADS"])
    rows, slots, values = latents.rows, latents.slots, cache.values
    scales = cache.scales if cache.is_fp8 else values
    _absorb_latent_kernel[(tiles.num_programs + num_tokens * num_parts,)](
        q_nope, weight, absorbed, q_nope.stride(0), q_nope.stride(1), *weight.stride(), absorbed.stride(0),
        absorbed.stride(1), num_tokens, in_features, tiles.num_programs, q_rope, absorbed[..., cache.rank :], rows,
        latents.norm_weight, slots.positions, slots.slot_mapping, latents.rope.cos_sin, values, scales, cache.rope,
        rows.stride(0), values.stride(0), scales.stride(0), cache.rope.stride(0), latents.eps,
        PADDED=tiles.padded, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, num_warps=4, **shape,
        **dependent_launch(q_nope.device),
    )  # fmt: skip
