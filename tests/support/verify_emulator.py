"""The CUDA kernel of many verify rows on a CPU (emulation.py)."""

from __future__ import annotations

import emulation
from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.cuda import verify_attention


def emulate(call: AttentionCall, splits: int, seed: int) -> None:
    """What attention/cuda/verify_attention.py launches.  Raises if the grid's threads deadlock."""
    params = verify_attention.arguments(call, splits)
    emulation.run("emulate_verify.cc", verify_attention.defines(call.q.dtype, call.cache.dtype), params, seed)
