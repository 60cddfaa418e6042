"""What products of dense weights write out before they multiply: asked before any weight is read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream_kernels.gemm import int4_layout, int8_layout
from slipstream_kernels.gemm.limits import written_out_bytes
from slipstream_kernels.gemm.product import PLAIN_ROWS
from slipstream_kernels.gemm.tuning import MOST_ROWS, Case, Use, tuning_of
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.select import load_module

_WRITING = "dequantise+library"


class DenseWeight(NamedTuple):
    """Of integers, beside rows that are not quantised.  values: "int4" or "int8", which has no groups."""

    values: str
    out_features: int
    in_features: int
    group_size: int = 0


def dense_written_out_bytes(weight: DenseWeight, num_rows: int, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of the copy that products of up to so many rows on a GPU make first; 0 if none of them does.

    device: where no GPU is at hand to ask, the sizes alone say which form the weight will have.  dtype: of the rows.
    """
    is_at_hand = device.type == "cuda" and torch.cuda.is_available()
    uses = tuning_of(torch.cuda.get_device_name(device) if is_at_hand else "").uses
    refusal = _refusal_on(device, weight) if is_at_hand else _refusal_of_sizes(weight)
    form = weight.values if refusal is not None else {"int4": "w4a16", "int8": "w8a16"}[weight.values]
    if num_rows < least_rows_written_out(uses[form, PLAIN_ROWS], weight.out_features):
        return 0
    return written_out_bytes(weight.values, PLAIN_ROWS, 0, weight.out_features * weight.in_features, dtype)


def least_rows_written_out(uses: tuple[Use, ...], out_features: int) -> int:
    """Rows from which on a weight may be written out; more than MOST_ROWS: never."""
    least = 1  # all fewer are multiplied by kernels that take any weight
    for use in uses:
        for case in use.cases:
            first, last = case.ranges[0]
            if not case.out_features[0] <= out_features <= case.out_features[1]:
                continue
            if use.kernel.endswith(_WRITING):
                return max(least, first)
            if case == Case(case.ranges) and first <= least:
                least = max(least, last + 1)
    return MOST_ROWS + 1


def _refusal_of_sizes(weight: DenseWeight) -> str | None:
    _, out_features, in_features, group_size = weight
    if weight.values == "int8":
        return int8_layout.refusal(out_features, in_features)
    return int4_layout.refusal(out_features, in_features, group_size)


def _refusal_on(device: torch.device, weight: DenseWeight) -> str | None:
    """The answer of the kernels for the form that they want."""
    module = load_module("cuda", f"gemm.{weight.values}_mm")
    refusal: str | None
    if weight.values == "int8":
        one = torch.empty((1, 1), dtype=torch.int8, device=device)
        refusal = module.refusal(one.expand(weight.out_features, weight.in_features))
    else:
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        sizes = weight.group_size, weight.out_features, weight.in_features
        refusal = module.refusal(Int4Weight(empty, empty, None, *sizes))
    return refusal
