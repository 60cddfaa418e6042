"""KvCache: the keys and values of one layer in blocks, and the format of each cache type.

The dtype of the tensors names the type: a float type; float8_e4m3fn; int8; uint8 for int4 with two values per byte:
dim 2n is the low nibble of byte n, dim 2n + 1 the high one, and a nibble is the value plus 8.
value = stored * scale.  fp8: one given scale per kv head, or 1.  int8, int4: one fp32 scale per token and head, written
with the token; int4 scales may be negative (fp32 costs 1.5 % more bytes than fp16 for int8 at head_dim 128 and cannot
overflow).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP8_DTYPE, INT8_DTYPE, INT4_DTYPE = torch.float8_e4m3fn, torch.int8, torch.uint8
TOKEN_SCALED_DTYPES = (INT8_DTYPE, INT4_DTYPE)
QUANTIZED_KV_DTYPES = {"fp8_e4m3": FP8_DTYPE, "int8": INT8_DTYPE, "int4": INT4_DTYPE}
QUANTIZED_DTYPES = tuple(QUANTIZED_KV_DTYPES.values())


@dataclass(frozen=True)
class KvCache:
    """key, value: [num_blocks, num_kv_heads, block_size, head_dim], contiguous; int4 has head_dim / 2 bytes.

    key_scale, value_scale: fp32; int8, int4: [num_blocks, num_kv_heads, block_size]; fp8: [num_kv_heads], None is 1;
    float types have none.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.key.dtype

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def block_size(self) -> int:
        return self.key.shape[2]

    @property
    def block_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors whose first dimension is the block: those copied with a block."""
        scales = (self.key_scale, self.value_scale) if self.dtype in TOKEN_SCALED_DTYPES else ()
        return self.key, self.value, *(scale for scale in scales if scale is not None)


def empty_kv_cache(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    head_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> KvCache:
    """A zeroed cache.  shape: num_blocks, num_kv_heads, block_size, head_dim.  head_scales: of k and v, for fp8.

    Zeroed, because attention may read and mask unwritten slots, and 0 * NaN is NaN.
    """
    stored = (*shape[:3], stored_width(shape[3], dtype))
    key, value = (torch.zeros(stored, dtype=dtype, device=device) for _ in range(2))
    if dtype in TOKEN_SCALED_DTYPES:
        key_scale, value_scale = (torch.zeros(shape[:3], dtype=torch.float32, device=device) for _ in range(2))
        return KvCache(key, value, key_scale, value_scale)
    return KvCache(key, value, *(head_scales if dtype == FP8_DTYPE and head_scales is not None else ()))


def stored_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a cache's last dimension."""
    return head_dim // 2 if dtype == INT4_DTYPE else head_dim


def kv_row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one key (or value) of one head, its scale included."""
    scale = torch.float32.itemsize if dtype in TOKEN_SCALED_DTYPES else 0
    return stored_width(head_dim, dtype) * dtype.itemsize + scale


def check_kv_cache(cache: KvCache, num_kv_heads: int, head_dim: int, plain_dtype: torch.dtype) -> None:
    """Raise ValueError unless the cache has these sizes.  plain_dtype: the float type that is accepted."""
    for field, tensor, scale in (("key", cache.key, cache.key_scale), ("value", cache.value, cache.value_scale)):
        if tensor.dtype not in (*QUANTIZED_DTYPES, plain_dtype):
            accepted = f"{plain_dtype}, {FP8_DTYPE}, {INT8_DTYPE} or {INT4_DTYPE} (int4)".replace("torch.", "")
            raise ValueError(f"cache.{field}: dtype {tensor.dtype}, expected {accepted}")
        width = stored_width(head_dim, tensor.dtype)
        if tensor.dim() != 4 or (tensor.shape[1], tensor.shape[3]) != (num_kv_heads, width):
            expected = f"[num_blocks, {num_kv_heads}, block_size, {width}]"
            raise ValueError(f"cache.{field}: shape {tuple(tensor.shape)}, expected {expected}")
        if not tensor.is_contiguous():
            raise ValueError(f"cache.{field}: must be contiguous")
        _check_scale(f"{field}_scale", tensor, scale)
    if cache.value.shape != cache.key.shape or cache.value.dtype != cache.key.dtype:
        found = f"{cache.value.dtype} {tuple(cache.value.shape)}"
        raise ValueError(f"cache.value: {found}, expected the keys' {cache.key.dtype} {tuple(cache.key.shape)}")


def _check_scale(field: str, cache: torch.Tensor, scale: torch.Tensor | None) -> None:
    if scale is None:
        if cache.dtype in TOKEN_SCALED_DTYPES:
            raise ValueError(f"{field}: {cache.dtype} needs scales of shape {tuple(cache.shape[:3])}")
        return
    if cache.dtype not in QUANTIZED_DTYPES:
        raise ValueError(f"{field}: a cache of {cache.dtype} has none")
    expected = tuple(cache.shape[:3]) if cache.dtype in TOKEN_SCALED_DTYPES else (cache.shape[1],)
    if tuple(scale.shape) != expected or scale.dtype != torch.float32 or not scale.is_contiguous():
        found = f"{scale.dtype} {tuple(scale.shape)}"
        raise ValueError(f"{field}: {found}, expected contiguous float32 {expected}")
