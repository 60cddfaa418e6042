"""Whether the kernels of this process are compiled or interpreted, and the one operation that must differ.

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
