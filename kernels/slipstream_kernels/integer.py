"""Integer weights and activations: the containers passed between ops and implementations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

INT8_MAX = 127.0
SYMMETRIC_ZERO = 8  # the zero-point of 4-bit weights without zero-points
MAX_CODE = 15
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # by their codes
E8M0_BIAS = 127  # of the exponents of MX scales; 255 is no number
W4A8_DTYPE = torch.int64  # dtype of weights that are prepacked for FP8 rows
SMALLEST_AMAX = 1e-30  # rows of zeros get a scale too: its reciprocal must stay finite


@dataclass(frozen=True)
class Int4Weight:
    """4-bit weights: w = (q - zero) * scale, with one zero and scale per row and group of `group_size` input features.

    Canonical form (checkpoints are read into it, CPUs compute from it):
      packed uint8 [out_features, in_features / 2], q in 0..15, low nibble = even input feature;
      scales float32 [out_features, in_features / group_size];
      zeros uint8 of that shape (0..16: GPTQ stores zero - 1), or None: 8 throughout.
    Prepacked (ops.repack_int4) for a device's kernels: `packed` has another dtype than uint8 and the same number of
    bytes; the kernel defines scales and zeros.  group_size is in_features for one group a row.
    W4A8: `packed` is int64 [in_features / 128, out_features / 16, 128].
    Grouped W4A8 (ops.repack_expert_int4 for FP8 rows): `packed` is int64 [in_features / 128, out_features / 16, 136],
    with the group scales and zero points behind each tile's weights; scales is [out_features], zeros is None.

    is_e2m1: MXFP4.  w = E2M1[q] * 2^(scale - E8M0_BIAS), with scales uint8 and without zeros.
    Grouped MXFP4 (ops.repack_expert_int4): `packed` is int32 [out_features / 32, in_features / 64 rounded up, 272],
    with the scales in it; scales is empty.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    out_features: int
    in_features: int
    is_e2m1: bool = False

    @property
    def is_repacked(self) -> bool:
        return self.packed.dtype != torch.uint8

    @property
    def is_for_fp8_rows(self) -> bool:
        return self.packed.dtype == W4A8_DTYPE and self.zeros is not None

    @property
    def is_grouped_w4a8(self) -> bool:
        return self.packed.dtype == W4A8_DTYPE and self.zeros is None

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by field name."""
        fields = {"packed": self.packed, "scales": self.scales}
        return fields if self.zeros is None else {**fields, "zeros": self.zeros}


def int4_weight(
    packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int, in_features: int
) -> Int4Weight:
    """An Int4Weight from its tensors, canonical or repacked.  group_size 0: one group a row."""
    is_for_fp8_rows = packed.dtype == W4A8_DTYPE
    out_features = (
        16 * packed.shape[1] if is_for_fp8_rows else 2 * packed.numel() * packed.element_size() // in_features
    )
    return Int4Weight(packed, scales, zeros, group_size or in_features, out_features, in_features)


@dataclass(frozen=True)
class Int8Rows:
    """Quantised rows: x[t, k] = values[t, k] * scales[t].

    values: [num_tokens, size] int8, contiguous.  scales: [num_tokens] fp32.  dtype: of the unquantised rows and of
    products.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def num_tokens(self) -> int:
        return self.values.shape[0]
