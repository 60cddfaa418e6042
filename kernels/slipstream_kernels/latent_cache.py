"""LatentCache: the cache of multi-head latent attention (MLA), one row per token for all heads, and its two formats.
StepLatents: what a step writes there.  TokenRanges: what prompts read.

A row is the normed latent, `rank` features, and the rotated key part that all heads share, `rope_dim` features.
Plain: both in the model's dtype. FP8: e4m3 latents, one fp32 scale per 128 of them (value = stored * scale), then
bf16 rope features, which lose too much in 8 bits.  512 + 64 features are 1152 bytes in bf16 and 656 in FP8.
Source: DeepSeek-V2, arXiv:2405.04434; the FP8 row: DeepSeek-V3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream_kernels.kv_cache import FP8_DTYPE
from slipstream_kernels.rotation import Rope
from slipstream_kernels.token_slots import TokenSlots

LATENT_GROUP = 128  # latent features per scale
SCALE_BYTES = torch.float32.itemsize
ROPE_DTYPE = torch.bfloat16  # of FP8 rows
ROW_DTYPE = torch.uint8  # that FP8 rows are held as


@dataclass(frozen=True)
class LatentCache:
    """rows: [num_blocks, 1, block_size, width], contiguous; width as `latent_row` gives it."""

    rows: torch.Tensor
    rank: int
    rope_dim: int

    @property
    def is_fp8(self) -> bool:
        return self.rows.dtype == ROW_DTYPE

    @property
    def block_size(self) -> int:
        return self.rows.shape[2]

    @property
    def num_groups(self) -> int:
        """Scales of a row."""
        return self.rank // LATENT_GROUP if self.is_fp8 else 0

    @property
    def values(self) -> torch.Tensor:
        """[num_slots, rank]: latents as stored."""
        rows = self._flat
        return (rows.view(FP8_DTYPE) if self.is_fp8 else rows)[:, : self.rank]

    @property
    def scales(self) -> torch.Tensor:
        """[num_slots, rank / 128] fp32 of an FP8 cache."""
        return self._flat.view(torch.float32)[:, self.rank // SCALE_BYTES :][:, : self.num_groups]

    @property
    def rope(self) -> torch.Tensor:
        """[num_slots, rope_dim]: the keys' rotated part."""
        if not self.is_fp8:
            return self._flat[:, self.rank :]
        first = (self.rank + SCALE_BYTES * self.num_groups) // ROPE_DTYPE.itemsize
        return self._flat.view(ROPE_DTYPE)[:, first:]

    @property
    def _flat(self) -> torch.Tensor:
        return self.rows.view(-1, self.rows.shape[3])


@dataclass(frozen=True)
class StepLatents:
    """The latents of a step's tokens as projected, and what makes cache rows of them.

    rows: [num_tokens, rank + rope_dim], the last dimension contiguous.
    rope: of all rope_dim features, which keep their order.  norm_weight: [rank], dtype of rows.
    """

    rows: torch.Tensor
    slots: TokenSlots
    rope: Rope
    norm_weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class TokenRanges:
    """Cached tokens of several requests: lens[r] from first_tokens[r] on, as rows from start_loc[r] on.

    block_tables: [num_requests, max_blocks] int32.  first_tokens, lens: [num_requests] int32.  start_loc:
    [num_requests + 1] int32, at least lens[r] apart.
    """

    block_tables: torch.Tensor
    first_tokens: torch.Tensor
    lens: torch.Tensor
    start_loc: torch.Tensor


def latent_row(rank: int, rope_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """(elements, dtype) of a row.  dtype: float8_e4m3fn, or the model's.  Raises ValueError for what has no row."""
    if dtype != FP8_DTYPE:
        return rank + rope_dim, dtype
    if rank % LATENT_GROUP or rope_dim % 2:
        raise ValueError(f"FP8 rows need latents of a multiple of {LATENT_GROUP} features, not {rank}")
    return rank + SCALE_BYTES * (rank // LATENT_GROUP) + ROPE_DTYPE.itemsize * rope_dim, ROW_DTYPE


def empty_latent_cache(
    num_blocks: int, block_size: int, rank: int, rope_dim: int, dtype: torch.dtype, device: torch.device
) -> LatentCache:
    """A zeroed cache; why zeros: empty_kv_cache."""
    width, stored = latent_row(rank, rope_dim, dtype)
    return LatentCache(torch.zeros(num_blocks, 1, block_size, width, dtype=stored, device=device), rank, rope_dim)


def check_latent_cache(cache: LatentCache, plain_dtype: torch.dtype) -> None:
    """Raise ValueError unless the rows fit the sizes.  plain_dtype: the float type that is accepted."""
    rows = cache.rows
    if rows.dtype not in (ROW_DTYPE, plain_dtype):
        raise ValueError(f"cache: dtype {rows.dtype}, expected {plain_dtype}, or {ROW_DTYPE} of FP8 rows")
    width, _ = latent_row(cache.rank, cache.rope_dim, FP8_DTYPE if cache.is_fp8 else rows.dtype)
    if rows.dim() != 4 or (rows.shape[1], rows.shape[3]) != (1, width) or not rows.is_contiguous():
        expected = f"contiguous [num_blocks, 1, block_size, {width}]"
        raise ValueError(f"cache: shape {tuple(rows.shape)}, expected {expected}")
