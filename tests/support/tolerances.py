"""The one table of tolerances for kernel tests, by dtype of the tensors:
(relative, absolute) for torch.testing.assert_close.
"""

from __future__ import annotations

import torch

# Elementwise ops round a handful of times: about two units in the last place (bf16 2^-8, fp16 2^-11).
# bf16 has one more: the interpreter truncates where hardware rounds to nearest.
ELEMENTWISE = {
    torch.float32: (1e-5, 1e-6),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (2e-3, 1e-3),
}

# Attention adds the rounding of scores and probabilities, averaged over the keys; values of unit variance.
ATTENTION = {
    torch.float32: (2e-5, 5e-6),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (3e-3, 3e-3),
}

# FP8 products against fp64 of the same quantised operands: what remains is the sum (absolute part, in units of the root
# of the summed squares of products) and the final rounding. FP8 tensor cores keep about 14 bits within 128 columns.
SCALED_MM = {
    ("cpu", torch.float32): (1e-5, 1e-5),
    ("cpu", torch.bfloat16): (1e-2, 1e-3),
    ("cuda", torch.float32): (1e-3, 2e-3),
    ("cuda", torch.bfloat16): (1e-2, 2e-3),
}

# Products of integer weights, as above; a kernel may round weights to x's dtype (2^-9 of each, in bf16).
INT_MM = {
    ("cpu", torch.float32): (1e-5, 1e-5),
    ("cpu", torch.bfloat16): (1e-2, 1e-3),
    ("cuda", torch.float32): (1e-3, 2e-3),
    ("cuda", torch.bfloat16): (1e-2, 6e-3),
}

# 4-bit weights that a kernel expands to bf16: scales are rounded first, then weights (2^-9 each).
EXPANDED_INT4 = (1e-2, 1.2e-2)

# 4-bit weights in a CPU's layout for bf16 rows: group scales, what zero-points add, and sums before the bias are
# rounded to bf16 (2^-9).
INT4_PACKED_ON_CPU = (1e-2, 2e-2)
