"""Whether the kernels of this process are compiled or interpreted, and the operations that must differ.

Triton-lang decides at decoration time, its own library's at `import triton`: TRITON_INTERPRET=1 must be set before
that.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What triton's own library became at import, not what the environment says now.
IS_INTERPRETING = not isinstance(tl.sum, triton.JITFunction)
INTERPRETING = tl.constexpr(IS_INTERPRETING)


@triton.jit
def dot(a, b):
    """a @ b in fp32.  The interpreter multiplies bf16 as if it were integers (errors of 1e10, silently):
    upcast there.
    """
    if INTERPRETING:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_onto(acc, a, b):
    """acc + a @ b, added up in the tensor core; see dot."""
    if INTERPRETING:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def to_e4m3(x):
    """fp32 within ±448 to e4m3, to nearest even.  The interpreter's own cast loses carries out of the mantissa (31.3
    becomes 16): there x is rounded to the grid of e4m3 first, which the cast then keeps.
    """
    if INTERPRETING:
        magnitude = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        steps = 8.0 / tl.maximum(magnitude, 0.015625)  # steps of e4m3 per unit at x; below 2^-6 they stay equal
        x = ((x * steps + 12582912.0) - 12582912.0) / steps  # 1.5 * 2^23: no room is left for a fraction
    return x.to(tl.float8e4nv)
