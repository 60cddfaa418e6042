"""Public operations of the kernel package; everything that models and runtime may import.

Each function checks its arguments, picks an implementation (`backend="auto" | "reference" | "triton"`) and calls it.
Importing this module does not import triton: that happens when a triton implementation is first chosen.
"""

from slipstream_kernels.fp8 import Fp8Rows, Fp8Scheme
from slipstream_kernels.integer import Int4Weight, Int8Rows, int4_weight
from slipstream_kernels.kv_cache import QUANTIZED_KV_DTYPES, KvCache, empty_kv_cache, kv_row_bytes
from slipstream_kernels.layer_stack import LayerStack, ScaledRows, StackLayer, StackRows, StackWeight
from slipstream_kernels.ops.accept_drafts import KeptRows, accept_drafts, empty_kept_rows
from slipstream_kernels.ops.advance_rows import DraftRows, StepRows, advance_rows
from slipstream_kernels.ops.cluster_mm import cluster_mm, prefers_clusters
from slipstream_kernels.ops.decode_attention import decode_attention
from slipstream_kernels.ops.decode_layers import decode_layers, decode_layers_refusal, max_stacked_tokens
from slipstream_kernels.ops.grouped_int4_mm import grouped_int4_mm, max_plain_expert_tokens, repack_expert_int4
from slipstream_kernels.ops.grouped_mm import grouped_mm
from slipstream_kernels.ops.int4_mm import int4_mm, int4_total_columns, repack_int4
from slipstream_kernels.ops.int8_mm import int8_mm, repack_int8
from slipstream_kernels.ops.invariant_attention import invariant_attention
from slipstream_kernels.ops.invariant_mm import invariant_mm
from slipstream_kernels.ops.level_rows import LevelRows, level_rows
from slipstream_kernels.ops.logprobs import TopLogprobs, top_logprobs
from slipstream_kernels.ops.move_slots import SlotTable, move_slots, slot_table
from slipstream_kernels.ops.paged_attention import paged_attention
from slipstream_kernels.ops.penalties import apply_bias, apply_penalties
from slipstream_kernels.ops.quantize_fp8 import quantize_fp8, quantize_fp8_blocks
from slipstream_kernels.ops.quantize_int4 import (
    dequantize_int4,
    pack_int4,
    quantize_int4,
    quantize_int8_weight,
    unpack_int4,
)
from slipstream_kernels.ops.quantize_int8 import quantize_int8
from slipstream_kernels.ops.reject_drafts import reject_drafts, token_probs
from slipstream_kernels.ops.rms_norm import rms_norm
from slipstream_kernels.ops.rms_norm_fp8 import rms_norm_fp8
from slipstream_kernels.ops.rope_write_kv import rope_write_kv
from slipstream_kernels.ops.route_experts import combine_experts, route_experts
from slipstream_kernels.ops.sample import greedy, sample
from slipstream_kernels.ops.scaled_mm import block_scales, scaled_mm, scaled_mm_counters
from slipstream_kernels.ops.select import BACKENDS, select
from slipstream_kernels.ops.silu_mul import silu_mul
from slipstream_kernels.ops.silu_mul_fp8 import silu_mul_fp8
from slipstream_kernels.ops.stream_mm import max_streamed_tokens, stream_mm
from slipstream_kernels.rotation import HeadNorms, Rope
from slipstream_kernels.routing import Routing

__all__ = [
    "BACKENDS",
    "QUANTIZED_KV_DTYPES",
    "DraftRows",
    "Fp8Rows",
    "Fp8Scheme",
    "HeadNorms",
    "Int4Weight",
    "Int8Rows",
    "KeptRows",
    "KvCache",
    "LayerStack",
    "LevelRows",
    "Rope",
    "Routing",
    "ScaledRows",
    "SlotTable",
    "StackLayer",
    "StackRows",
    "StackWeight",
    "StepRows",
    "TopLogprobs",
    "accept_drafts",
    "advance_rows",
    "apply_bias",
    "apply_penalties",
    "block_scales",
    "cluster_mm",
    "combine_experts",
    "decode_attention",
    "decode_layers",
    "decode_layers_refusal",
    "dequantize_int4",
    "empty_kept_rows",
    "empty_kv_cache",
    "greedy",
    "grouped_int4_mm",
    "grouped_mm",
    "int4_mm",
    "int4_total_columns",
    "int4_weight",
    "int8_mm",
    "invariant_attention",
    "invariant_mm",
    "kv_row_bytes",
    "level_rows",
    "max_plain_expert_tokens",
    "max_stacked_tokens",
    "max_streamed_tokens",
    "move_slots",
    "pack_int4",
    "paged_attention",
    "prefers_clusters",
    "quantize_fp8",
    "quantize_fp8_blocks",
    "quantize_int4",
    "quantize_int8",
    "quantize_int8_weight",
    "reject_drafts",
    "repack_expert_int4",
    "repack_int4",
    "repack_int8",
    "rms_norm",
    "rms_norm_fp8",
    "rope_write_kv",
    "route_experts",
    "sample",
    "scaled_mm",
    "scaled_mm_counters",
    "select",
    "silu_mul",
    "silu_mul_fp8",
    "slot_table",
    "stream_mm",
    "token_probs",
    "top_logprobs",
    "unpack_int4",
]
