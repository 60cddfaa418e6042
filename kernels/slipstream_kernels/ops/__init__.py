"""Public operations of the kernel package; everything that models and runtime may import.

Each function checks its arguments, picks an implementation (`backend="auto" | "reference" | "triton"`) and calls it.
Importing this module does not import triton: that happens when a triton implementation is first chosen.
"""

from slipstream_kernels.ops.decode_attention import decode_attention
from slipstream_kernels.ops.logprobs import TopLogprobs, top_logprobs
from slipstream_kernels.ops.paged_attention import paged_attention
from slipstream_kernels.ops.penalties import apply_bias, apply_penalties
from slipstream_kernels.ops.quantized_kv import write_quantized_kv
from slipstream_kernels.ops.rms_norm import rms_norm
from slipstream_kernels.ops.rope import rope
from slipstream_kernels.ops.sample import sample
from slipstream_kernels.ops.select import BACKENDS, select
from slipstream_kernels.ops.silu_mul import silu_mul
from slipstream_kernels.ops.write_kv import write_kv

__all__ = [
    "BACKENDS",
    "TopLogprobs",
    "apply_bias",
    "apply_penalties",
    "decode_attention",
    "paged_attention",
    "rms_norm",
    "rope",
    "sample",
    "select",
    "silu_mul",
    "top_logprobs",
    "write_kv",
    "write_quantized_kv",
]
