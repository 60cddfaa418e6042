"""Whether this process compiles or interprets kernels, and operations that the interpreter needs differently.

Triton-lang decides when a function is decorated, for its own library at `import triton`: set TRITON_INTERPRET=1 before.
"""

from __future__ import annotations

import triton
import triton.language as tl

# As triton's library was decorated at import; the environment may have changed since.
IS_INTERPRETING = not isinstance(tl.sum, triton.JITFunction)
INTERPRETING = tl.constexpr(IS_INTERPRETING)


def padded_width(num_features: int) -> int:
    """The block that holds these features: a power of two, and at least the 16 that a compiled tl.dot sums over (the
    interpreter takes fewer)."""
    return max(triton.next_power_of_2(num_features), 16)


@triton.jit
def dot(a, b):
    """a @ b in fp32.  Upcasts in the interpreter, which multiplies bf16 as integers (silent errors of 1e10)."""
    if INTERPRETING:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_onto(acc, a, b):
    """acc + a @ b, accumulated by the tensor core; see dot."""
    if INTERPRETING:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def to_e4m3(x):
    """fp32 within ±448 to e4m3, to nearest even.  The interpreter's cast loses carries out of the mantissa (31.3 ->
    16), so there x is first rounded to a value of e4m3, which the cast keeps.
    """
    if INTERPRETING:
        magnitude = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        steps = 8.0 / tl.maximum(magnitude, 0.015625)  # steps of e4m3 per unit at x; below 2^-6 they stay equal
        x = ((x * steps + 12582912.0) - 12582912.0) / steps  # adding 1.5 * 2^23 rounds to an integer
    return x.to(tl.float8e4nv)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 to bf16 or fp16, to nearest even.  The interpreter truncates to bf16, so there x is first rounded to a value
    of bf16.
    """
    if INTERPRETING and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)
