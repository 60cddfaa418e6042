"""What a product of experts' 4-bit weights writes out before it reads it: asked before any weight is read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream_kernels.gemm.limits import written_out_bytes
from slipstream_kernels.gemm.product import FP8_ROWS, PLAIN_ROWS
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe.grouped_int4_mm import expert_form
from slipstream_kernels.moe.tuning import MOST_TOKENS, Use, tuning_of

# forms of weights in memory, by their values and the form of the rows; the first is the canonical one
FORMS = {
    ("int4", PLAIN_ROWS): ("int4", "grouped_w4a16"),
    ("int4", FP8_ROWS): ("int4", "grouped_w4a16", "grouped_w4a8"),
    ("mxfp4", PLAIN_ROWS): ("mxfp4", "grouped_mxfp4"),
}


class Int4Experts(NamedTuple):
    """4-bit weights of experts that are to be held.  out_features: of all.  values: "int4" or "mxfp4".

    fp8_rows: they are multiplied by FP8 rows alone.
    """

    num_experts: int
    out_features: int
    in_features: int
    group_size: int
    values: str
    fp8_rows: bool = False


def experts_written_out_bytes(experts: Int4Experts, num_rows: int, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of the copy that a product of so many rows makes first, and reads whole; 0 if it makes none.

    num_rows: as Routing.sizes has them.  device: where no GPU is at hand to ask, the form that the weights will have is
    unknown, and the fewest rows of all forms count.  dtype: of rows that are not FP8.
    """
    values, rows = experts.values, FP8_ROWS if experts.fp8_rows else PLAIN_ROWS
    forms, name = FORMS[values, rows], ""
    if device.type == "cuda" and torch.cuda.is_available():
        forms, name = (_form_on(device, experts),), torch.cuda.get_device_name(device)
    least = min(least_rows_written_out(tuning_of(name).uses[form, rows]) for form in forms)
    if num_rows < experts.num_experts * least:
        return 0
    num_weights = experts.out_features * experts.in_features
    return written_out_bytes(values, rows, experts.num_experts, num_weights, dtype)


def _form_on(device: torch.device, experts: Int4Experts) -> str:
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    sizes = experts.group_size, experts.out_features, experts.in_features
    weight = Int4Weight(empty, empty, None, *sizes, is_e2m1=experts.values == "mxfp4")
    return expert_form(weight, experts.num_experts, fp8_rows=experts.fp8_rows)[0]


def least_rows_written_out(uses: tuple[Use, ...]) -> int:
    """Rows of the average expert from which on weights are written out; MOST_TOKENS: never."""
    for use in uses:
        if use.writes_out:
            return use.least_rows
        if not use.least_rows and not use.least_in_features and use.most_tokens == MOST_TOKENS:
            break  # it takes all that are left
    return MOST_TOKENS
