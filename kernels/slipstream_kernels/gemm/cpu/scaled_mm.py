"""scaled_mm on a CPU: no CPU of today multiplies e4m3, so a piece of the weight at a time is written out in fp32.

Bits are moved instead of converted: e4m3 shifted into the place of an fp16 is the value / 256, exactly, subnormals
too.  torch converts element by element: 7 ms for a weight of 3072 x 576 on one Zen 4 core, this takes 0.4 ms.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slipstream_kernels.fp8 import BLOCK, Fp8Rows

MOVED = 256.0  # what moved bits are short of
PIECE_ELEMENTS = 1 << 18  # written out at a time: stays in the second-level cache
_NAN_CODE = 127
_NOT_BIT_14 = ~0x4000


def scaled_mm(
    x: torch.Tensor | Fp8Rows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ops.scaled_mm, and ops.skinny_gemm for rows that are not quantised."""
    rows = x.float() if isinstance(x, torch.Tensor) else _written_out_rows(x)
    step = max(1, PIECE_ELEMENTS // weight.shape[1] // BLOCK) * BLOCK
    pieces = [_piece(rows, weight, scales, first, step) for first in range(0, weight.shape[0], step)]
    y = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    if bias is not None:
        y += bias
    return y.to(x.dtype)


def _piece(rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, first: int, step: int) -> torch.Tensor:
    written_out = move_bits(weight[first : first + step])
    if scales.dim() == 1:
        return F.linear(rows, written_out).mul_(scales[first : first + step] * MOVED)
    own = scales[first // BLOCK : -(-(first + step) // BLOCK), : weight.shape[1] // BLOCK] * MOVED
    by_row = own.repeat_interleave(BLOCK, dim=0)[: written_out.shape[0]]
    written_out.unflatten(1, (-1, BLOCK)).mul_(by_row[:, :, None])
    return F.linear(rows, written_out)


def _written_out_rows(x: Fp8Rows) -> torch.Tensor:
    wide = move_bits(x.values[: x.num_tokens])
    groups = x.scales.shape[1]
    return (wide.unflatten(1, (groups, -1)) * (x.scales[: x.num_tokens, :, None] * MOVED)).flatten(1)


def move_bits(values: torch.Tensor) -> torch.Tensor:
    """e4m3 values / MOVED in fp32; NaN is not kept (480 / MOVED)."""
    bits = values.view(torch.int8).to(torch.int16)  # the sign in bits 7 to 15
    return bits.mul_(128).bitwise_and_(_NOT_BIT_14).view(torch.float16).float()


def scales_with_nan(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The scales, NaN where the row or block has a weight that is NaN: move_bits would make it a number."""
    is_nan = (weight.view(torch.uint8) & 127) == _NAN_CODE
    if not bool(is_nan.any()):
        return scales
    scales = scales.clone()
    rows, columns = is_nan.nonzero(as_tuple=True)
    scales[(rows,) if scales.dim() == 1 else (rows // BLOCK, columns // BLOCK)] = torch.nan
    return scales
