"""int8_mm on a CPU with VNNI, AMX or the like: every product is an exact integer product (oneDNN).

Float rows are written in balanced base-256 digits of one scale per row, each digit a row of int8: 16 bits for rows of
16 bits, 24 for fp32.  Sums of digits are exact in int32, so a result depends on its own row alone.
"""

from __future__ import annotations

from functools import cache

import torch

from slipstream_kernels.integer import SMALLEST_AMAX, Int8Rows

BASE = 256
LARGEST_DIGIT = 127
MAX_IN_FEATURES = (1 << 31) // (128 * LARGEST_DIGIT)  # more could overflow an int32 sum
ROWS_AT_ONCE = 256  # bounds the sums that are held at once: digits x rows x output features, 4 bytes each
_HALF_OF_EACH_BYTE = 0x00808080


@cache
def saturates() -> bool:
    """Whether the library's integer products are wrong here. On x86 without VNNI it adds two of them in 16 bits."""
    rows = torch.full((1, 32), LARGEST_DIGIT, dtype=torch.int8)
    return bool((torch._int_mm(rows, rows.expand(16, -1).t()) != 32 * LARGEST_DIGIT**2).any())


def int8_mm(
    x: torch.Tensor | Int8Rows,
    values: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ops.int8_mm."""
    if isinstance(x, Int8Rows):
        y = torch._int_mm(x.values, values.t()).float().mul_(x.scales[:, None]).mul_(scales)
    elif x.shape[0] <= ROWS_AT_ONCE:
        y = _float_rows(x, values, scales)
    else:
        y = torch.cat([_float_rows(rows, values, scales) for rows in x.split(ROWS_AT_ONCE)])
    if bias is not None:
        y += bias
    return y.to(x.dtype)


def _float_rows(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    num_digits = 3 if x.dtype == torch.float32 else 2
    digits, row_scales = split_digits(x.float(), num_digits)
    sums = torch._int_mm(digits.flatten(0, 1), values.t()).float().unflatten(0, (num_digits, -1))
    y = sums[-1]
    for lower in sums[:-1].flip(0):
        y = torch.add(lower, y, alpha=BASE)
    return y.mul_(row_scales).mul_(scales)


def split_digits(x: torch.Tensor, num_digits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(digits int8 [num_digits, num_rows, size], the lowest first; scales fp32 [num_rows, 1]) of fp32 rows.

    x = scale * sum of BASE^i * digits[i], rounded; the largest of a row is +-LARGEST_DIGIT * BASE^(num_digits - 1).
    A row that holds NaN or infinity has a scale that is none either.
    """
    limit = LARGEST_DIGIT * BASE ** (num_digits - 1)
    scales = x.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST_AMAX).div_(limit)
    whole = (x / scales).round_().clamp_(-limit, limit).to(torch.int32)
    # adding half of each byte and flipping each top bit turns two's complement bytes into balanced digits
    bytes_of = whole.add_(_HALF_OF_EACH_BYTE).view(torch.uint8).unflatten(-1, (-1, 4))[..., :num_digits]
    return bytes_of.movedim(-1, 0).contiguous().bitwise_xor_(128).view(torch.int8), scales
