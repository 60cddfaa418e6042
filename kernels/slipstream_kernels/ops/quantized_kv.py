"""write_quantized_kv: contract.  Appends this step's keys and values to a cache of fp8, int8 or int4."""

from __future__ import annotations

import torch

from slipstream_kernels.decode_call import FP8_DTYPE, INT4_DTYPE, TOKEN_SCALED_DTYPES
from slipstream_kernels.ops.select import require_float, require_shape
from slipstream_kernels.reference import quantized_kv


def write_quantized_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Quantise each token's key and value and store them at its slot, in place.

    k, v: [num_tokens, num_kv_heads, head_dim].  slot_mapping: [num_tokens] int64, -1 writes nothing.
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim] float8_e4m3fn or int8, or int4 as uint8
    with head_dim / 2 bytes (dim 2n in the low nibble of byte n, value + 8).
    key_scale, value_scale, value = stored * scale: fp8: [num_kv_heads] fp32, read, None is 1 (beyond +-448 * scale
    values saturate); int8, int4: [num_blocks, num_kv_heads, block_size] fp32, written here, absmax / 127 or / 7 of each
    token's head.  fp32 and not fp16: 1.5 % more bytes than fp16 for int8 at head_dim 128, and no range to think of.
    """
    if k.dim() != 3:
        raise ValueError(f"k: shape {tuple(k.shape)}, expected [num_tokens, num_kv_heads, head_dim]")
    require_float("k", k)
    require_shape("v", v, tuple(k.shape))
    require_shape("slot_mapping", slot_mapping, (k.shape[0],))
    check_quantized_cache("key", key_cache, key_scale, k.shape[1], k.shape[2])
    check_quantized_cache("value", value_cache, value_scale, k.shape[1], k.shape[2])
    quantized_kv.write_quantized_kv(k, v, key_cache, value_cache, key_scale, value_scale, slot_mapping)


def check_quantized_cache(
    name: str, cache: torch.Tensor, scale: torch.Tensor | None, num_kv_heads: int, head_dim: int
) -> None:
    """Raise ValueError unless a quantised cache and its scale have the shapes of write_quantized_kv."""
    if cache.dtype not in (FP8_DTYPE, *TOKEN_SCALED_DTYPES):
        raise ValueError(f"{name}_cache: dtype {cache.dtype}, expected float8_e4m3fn, int8 or uint8 (int4)")
    width = head_dim // 2 if cache.dtype == INT4_DTYPE else head_dim
    if cache.dim() != 4 or (cache.shape[1], cache.shape[3]) != (num_kv_heads, width):
        raise ValueError(
            f"{name}_cache: shape {tuple(cache.shape)}, expected [num_blocks, {num_kv_heads}, block_size, {width}]"
        )
    if not cache.is_contiguous():
        raise ValueError(f"{name}_cache: must be contiguous")
    if scale is None:
        if cache.dtype in TOKEN_SCALED_DTYPES:
            raise ValueError(f"{name}_scale: {cache.dtype} needs scales of shape {tuple(cache.shape[:3])}")
        return
    expected = tuple(cache.shape[:3]) if cache.dtype in TOKEN_SCALED_DTYPES else (num_kv_heads,)
    require_shape(f"{name}_scale", scale, expected)
    if scale.dtype != torch.float32 or not scale.is_contiguous():
        raise ValueError(f"{name}_scale: must be contiguous float32, is {scale.dtype}")
