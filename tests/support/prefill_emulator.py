"""The CUDA kernel of prompts on a CPU (emulation.py)."""

from __future__ import annotations

import emulation
import torch
from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.cuda import prefill_attention, prefill_stage
from slipstream_kernels.attention.stage_fp8 import stage_fp8, staged_order

NUM_CTAS = 2


def emulate(call: AttentionCall, kv: int, seed: int) -> None:
    """What attention/cuda/prefill_attention.py launches for that PrefillKv.  Raises if the grid's threads deadlock."""
    staged: prefill_stage.Staged | None = None
    if kv == prefill_attention.ALL_FP8:
        call, staged = prefill_attention.in_fp8(call)
    elif kv == prefill_attention.FP8_KEYS:
        staged = _staged_values(call)
    counters = torch.zeros(2, dtype=torch.int32)
    params = prefill_attention.arguments(call, staged, NUM_CTAS, counters)
    defines = prefill_attention.variant(call.q.dtype, kv, call.q.shape[2])
    emulation.run("emulate_prefill.cc", defines, params, seed)
    assert not counters.any(), "a later launch would begin with work that this one has counted"


def _staged_values(call: AttentionCall) -> prefill_stage.Staged:
    """What prefill_stage.stage_values leaves of a cache of e4m3."""
    _, transposed = stage_fp8(call.cache, call.metadata, None)
    in_order = transposed[..., staged_order().argsort()].float()
    values = in_order.transpose(2, 3).half().unflatten(0, (call.metadata.num_requests, -1))
    return prefill_stage.Staged(None, values.contiguous(), values.shape[1])
