"""FP8 (e4m3) activations: the scheme of their scales, and the values and scales that quantising kernels return."""

from __future__ import annotations

from dataclasses import dataclass

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = 128  # columns of a group of activations, rows and columns of a block of weights
SUM_TILE_ROWS = 128  # whose activation sums lie together
MAX_SUMMED_ROWS = 256  # no kernel of more rows takes activation sums
TILE_ROWS = 128  # of cuBLASLt's products of more rows than that
SMALLEST_AMAX = 1e-30  # rows of zeros get a scale too: its reciprocal must stay finite


@dataclass(frozen=True)
class Fp8Scheme:
    """One scale per group of `group_size` columns of a row; 0: one per row.

    group_size: 0 or 128.  scale: one fp32 number on the device (static quantisation), only with group_size 0.
    sum_columns: 64 or 128: also sum each group of so many columns, which W4A8 products with zero points need (only with
    group_size 0); 0: no sums.  summed_rows: more rows have none.
    """

    group_size: int = 0
    scale: torch.Tensor | None = None
    sum_columns: int = 0
    summed_rows: int = MAX_SUMMED_ROWS

    def num_groups(self, size: int) -> int:
        """Scales per row of `size` columns."""
        return size // self.group_size if self.group_size else 1

    def check(self, size: int) -> None:
        """Raise ValueError unless rows of `size` columns can be quantised with this scheme."""
        if self.group_size not in (0, BLOCK):
            raise ValueError(f"group_size: {self.group_size}, expected 0 or {BLOCK}")
        if self.group_size and size % self.group_size:
            raise ValueError(f"group_size: {self.group_size} does not divide rows of {size}")
        if self.scale is not None and (self.group_size or self.scale.numel() != 1):
            raise ValueError("scale: a static scale is one number, and for whole rows")
        if self.sum_columns not in (0, BLOCK // 2, BLOCK):
            raise ValueError(f"sum_columns: {self.sum_columns}, expected 0, {BLOCK // 2} or {BLOCK}")
        if self.sum_columns and (self.group_size or size % self.sum_columns):
            raise ValueError(f"sum_columns: {self.sum_columns} does not divide rows of {size} with one scale each")
        if not 0 <= self.summed_rows <= MAX_SUMMED_ROWS:
            raise ValueError(f"summed_rows: {self.summed_rows}, expected 0 to {MAX_SUMMED_ROWS}")


PER_ROW = Fp8Scheme()


@dataclass(frozen=True)
class Fp8Rows:
    """Quantised rows: x[t, k] = values[t, k] * scales[t, group of k].

    values: [num_rows, size] e4m3, contiguous.  scales: [num_rows, num_groups] fp32, column-major, as scaled matmuls
    read them.  dtype: of the unquantised rows and of products.
    num_rows is num_tokens; with groups it is padded to a multiple of 4 (cuBLAS reads 16 bytes of scales), and the
    padding is undefined.
    activation_sums: [tiles of rows, size / sum_columns, SUM_TILE_ROWS] fp32: the sum of the values of each group of
    columns of each row, undefined from num_rows on; None if the scheme has none for so many rows.
    padded: values and scales with the undefined rows that are allocated after them, up to a multiple of TILE_ROWS. A
    product of all of them is faster than one that ends inside a tile. None if there are none.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype
    num_tokens: int
    activation_sums: torch.Tensor | None = None
    padded: tuple[torch.Tensor, torch.Tensor] | None = None


def activation_sums(values: torch.Tensor, sum_columns: int) -> torch.Tensor:
    """Fp8Rows.activation_sums of e4m3 rows, [num_rows, size]; zeros behind the last."""
    sums = values.float().unflatten(1, (-1, sum_columns)).sum(2).t()
    whole = torch.nn.functional.pad(sums, (0, -len(values) % SUM_TILE_ROWS))
    return whole.unflatten(1, (-1, SUM_TILE_ROWS)).transpose(0, 1).contiguous()


def padded_rows(num_tokens: int, scheme: Fp8Scheme) -> int:
    """Rows to allocate for num_tokens tokens."""
    return num_tokens + -num_tokens % 4 if scheme.group_size else num_tokens


def empty_rows(num_tokens: int, size: int, scheme: Fp8Scheme, like: torch.Tensor) -> Fp8Rows:
    """Uninitialised rows on the device of `like`, for activations of its dtype."""
    num_rows = padded_rows(num_tokens, scheme)
    if like.is_cuda and num_tokens > TILE_ROWS and num_tokens % TILE_ROWS and not scheme.group_size:
        return _rows_of_whole_tiles(num_tokens, size, scheme, like)
    values = torch.empty((num_rows, size), dtype=E4M3, device=like.device)
    scales = torch.empty((scheme.num_groups(size), num_rows), dtype=torch.float32, device=like.device)
    columns = scales.view(num_rows, 1) if scales.shape[0] == 1 else scales.t()
    return Fp8Rows(values, columns, like.dtype, num_tokens, _empty_sums(num_tokens, size, scheme, like))


def _empty_sums(num_tokens: int, size: int, scheme: Fp8Scheme, like: torch.Tensor) -> torch.Tensor | None:
    if not scheme.sum_columns or num_tokens > scheme.summed_rows:
        return None
    shape = (-(-num_tokens // SUM_TILE_ROWS), size // scheme.sum_columns, SUM_TILE_ROWS)
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _rows_of_whole_tiles(num_tokens: int, size: int, scheme: Fp8Scheme, like: torch.Tensor) -> Fp8Rows:
    """With a scale each."""
    num_rows = num_tokens + -num_tokens % TILE_ROWS
    values = torch.empty((num_rows, size), dtype=E4M3, device=like.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=like.device)
    sums = _empty_sums(num_tokens, size, scheme, like)
    return Fp8Rows(values[:num_tokens], scales[:num_tokens], like.dtype, num_tokens, sums, padded=(values, scales))
