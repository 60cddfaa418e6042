"""Public operations of the kernel package; everything that models and runtime may import.

Each function checks its arguments, picks an implementation (`backend="auto" | "reference" | "triton"`) and calls it.
Importing this module does not import triton: that happens when a triton implementation is first chosen.
"""

from slipstream_kernels.attention.attention_call import AttentionMetadata, AttentionOptions
from slipstream_kernels.attention.cpu.decode_step import CpuDecodeStep
from slipstream_kernels.attention.cuda.decode_attention import MAX_DECODE_REQUESTS
from slipstream_kernels.attention.decode_attention import decode_attention
from slipstream_kernels.attention.invariant_attention import MAX_INVARIANT_GROUP, invariant_attention
from slipstream_kernels.attention.invariant_latent_attention import invariant_latent_attention
from slipstream_kernels.attention.latent_attention import latent_attention
from slipstream_kernels.attention.limits import split_sums_bytes
from slipstream_kernels.attention.merge_attention import merge_attention
from slipstream_kernels.attention.paged_attention import (
    FP8_QUERY_HEAD_DIM,
    TRITON_HEAD_DIMS,
    paged_attention,
    triton_min_block_size,
)
from slipstream_kernels.attention.ragged_attention import ragged_attention
from slipstream_kernels.attention.ragged_call import RaggedKeys, RaggedMetadata
from slipstream_kernels.attention.stage_fp8 import stage_fp8
from slipstream_kernels.cuda.device import count_sms, hopper_refusal
from slipstream_kernels.fp8 import Fp8Rows, Fp8Scheme
from slipstream_kernels.gemm.activation_quant import PLAIN, Activation, ActivationQuant
from slipstream_kernels.gemm.head_mm import head_mm, invariant_head_mm
from slipstream_kernels.gemm.int4_mm import int4_mm
from slipstream_kernels.gemm.int8_mm import int8_mm, repack_int8
from slipstream_kernels.gemm.invariant_mm import invariant_mm
from slipstream_kernels.gemm.limits import (
    fp8_refusal,
    fp8_sums_bytes,
    w4a8_sums_bytes,
    w4a16_sums_bytes,
)
from slipstream_kernels.gemm.linear import gated_linear, linear, linear_before_bias
from slipstream_kernels.gemm.linear_weight import (
    LinearWeight,
    deterministic_weight,
    expert_counters,
    fp8_weight,
    int4_linear_weight,
    int8_weight,
    onednn_weight,
    plain_weight,
)
from slipstream_kernels.gemm.quantize_fp8 import quantize_fp8, quantize_fp8_blocks
from slipstream_kernels.gemm.quantize_int4 import (
    dequantize_int4,
    pack_int4,
    quantize_int4,
    quantize_int8_weight,
    unpack_int4,
)
from slipstream_kernels.gemm.quantize_int8 import quantize_int8
from slipstream_kernels.gemm.repack_int4 import activation_sum_columns, repack_int4
from slipstream_kernels.gemm.repack_plain import repack_plain
from slipstream_kernels.gemm.scaled_mm import block_scales, scaled_mm, scaled_mm_counters
from slipstream_kernels.gemm.skinny_gemm import skinny_gemm
from slipstream_kernels.gemm.swap_ab_gemm import swap_ab_gemm
from slipstream_kernels.gemm.write_outs import DenseWeight, dense_written_out_bytes
from slipstream_kernels.integer import Int4Weight, Int8Rows, int4_weight
from slipstream_kernels.invariant_sums import invariant_attention_bytes, invariant_latent_bytes, invariant_mm_bytes
from slipstream_kernels.kv.absorb_latent import absorb_latent
from slipstream_kernels.kv.compact_kv import SlotTable, compact_kv, slot_table
from slipstream_kernels.kv.gather_latent import gather_latent
from slipstream_kernels.kv.rope_write_kv import rope_write_kv
from slipstream_kernels.kv.write_latent import write_latent
from slipstream_kernels.kv_cache import QUANTIZED_KV_DTYPES, KvCache, empty_kv_cache, kv_row_bytes
from slipstream_kernels.latent_cache import (
    LATENT_GROUP,
    LatentCache,
    StepLatents,
    TokenRanges,
    empty_latent_cache,
    latent_row,
)
from slipstream_kernels.lora.lora_expand import lora_expand
from slipstream_kernels.lora.lora_shrink import lora_shrink
from slipstream_kernels.lora.tiles import MAX_FEW_TOKENS, NO_ROW, NO_SLOT, AdapterTiles, count_tiles, tile_rows
from slipstream_kernels.moe.combine_experts import combine_experts, gate_experts
from slipstream_kernels.moe.grouped_int4_mm import grouped_int4_mm, repack_expert_int4
from slipstream_kernels.moe.grouped_linear import grouped_gated_linear, grouped_linear
from slipstream_kernels.moe.grouped_mm import grouped_mm
from slipstream_kernels.moe.invariant_grouped_mm import invariant_grouped_mm
from slipstream_kernels.moe.local_routing import local_routing, local_rows
from slipstream_kernels.moe.route_experts import MAX_EXPERTS, route_experts
from slipstream_kernels.moe.write_outs import Int4Experts, experts_written_out_bytes
from slipstream_kernels.norm.gated_mul import ACTIVATIONS, gated_mul, gelu_mul, silu_mul
from slipstream_kernels.norm.gated_mul_fp8 import gated_mul_fp8, gelu_mul_fp8, silu_mul_fp8
from slipstream_kernels.norm.rms_norm import rms_norm
from slipstream_kernels.norm.rms_norm_fp8 import rms_norm_fp8
from slipstream_kernels.rotation import HeadNorms, QKRope, Rope
from slipstream_kernels.routing import Routing, RoutingRule
from slipstream_kernels.sample.logprobs import TopLogprobs, top_logprobs
from slipstream_kernels.sample.metadata import SamplingMetadata
from slipstream_kernels.sample.penalties import Penalties, apply_bias, apply_penalties
from slipstream_kernels.sample.sample import greedy, sample
from slipstream_kernels.sample.scale_logits import scale_logits
from slipstream_kernels.sample.token_masks import apply_token_masks
from slipstream_kernels.select import BACKENDS, select
from slipstream_kernels.spec.accept_drafts import AcceptedRows, VerifiedRows, accept_drafts, empty_accepted_rows
from slipstream_kernels.spec.prepare_draft_inputs import LevelPlaces, LevelRows, prepare_draft_inputs
from slipstream_kernels.spec.reject_drafts import DrawnDrafts, reject_drafts, token_probs
from slipstream_kernels.spec.unpack_step_inputs import ArrivedInputs, unpack_step_inputs
from slipstream_kernels.spec.update_step_inputs import DraftRows, StepRows, update_step_inputs
from slipstream_kernels.token_slots import TokenSlots

__all__ = [
    "ACTIVATIONS",
    "BACKENDS",
    "FP8_QUERY_HEAD_DIM",
    "LATENT_GROUP",
    "MAX_DECODE_REQUESTS",
    "MAX_EXPERTS",
    "MAX_FEW_TOKENS",
    "MAX_INVARIANT_GROUP",
    "NO_ROW",
    "NO_SLOT",
    "PLAIN",
    "QUANTIZED_KV_DTYPES",
    "TRITON_HEAD_DIMS",
    "AcceptedRows",
    "Activation",
    "ActivationQuant",
    "AdapterTiles",
    "ArrivedInputs",
    "AttentionMetadata",
    "AttentionOptions",
    "CpuDecodeStep",
    "DenseWeight",
    "DraftRows",
    "DrawnDrafts",
    "Fp8Rows",
    "Fp8Scheme",
    "HeadNorms",
    "Int4Experts",
    "Int4Weight",
    "Int8Rows",
    "KvCache",
    "LatentCache",
    "LevelPlaces",
    "LevelRows",
    "LinearWeight",
    "Penalties",
    "QKRope",
    "RaggedKeys",
    "RaggedMetadata",
    "Rope",
    "Routing",
    "RoutingRule",
    "SamplingMetadata",
    "SlotTable",
    "StepLatents",
    "StepRows",
    "TokenRanges",
    "TokenSlots",
    "TopLogprobs",
    "VerifiedRows",
    "absorb_latent",
    "accept_drafts",
    "activation_sum_columns",
    "apply_bias",
    "apply_penalties",
    "apply_token_masks",
    "block_scales",
    "combine_experts",
    "compact_kv",
    "count_sms",
    "count_tiles",
    "decode_attention",
    "dense_written_out_bytes",
    "dequantize_int4",
    "deterministic_weight",
    "empty_accepted_rows",
    "empty_kv_cache",
    "empty_latent_cache",
    "expert_counters",
    "experts_written_out_bytes",
    "fp8_refusal",
    "fp8_sums_bytes",
    "fp8_weight",
    "gate_experts",
    "gated_linear",
    "gated_mul",
    "gated_mul_fp8",
    "gather_latent",
    "gelu_mul",
    "gelu_mul_fp8",
    "greedy",
    "grouped_gated_linear",
    "grouped_int4_mm",
    "grouped_linear",
    "grouped_mm",
    "head_mm",
    "hopper_refusal",
    "int4_linear_weight",
    "int4_mm",
    "int4_weight",
    "int8_mm",
    "int8_weight",
    "invariant_attention",
    "invariant_attention_bytes",
    "invariant_grouped_mm",
    "invariant_head_mm",
    "invariant_latent_attention",
    "invariant_latent_bytes",
    "invariant_mm",
    "invariant_mm_bytes",
    "kv_row_bytes",
    "latent_attention",
    "latent_row",
    "linear",
    "linear_before_bias",
    "local_routing",
    "local_rows",
    "lora_expand",
    "lora_shrink",
    "merge_attention",
    "onednn_weight",
    "pack_int4",
    "paged_attention",
    "plain_weight",
    "prepare_draft_inputs",
    "quantize_fp8",
    "quantize_fp8_blocks",
    "quantize_int4",
    "quantize_int8",
    "quantize_int8_weight",
    "ragged_attention",
    "reject_drafts",
    "repack_expert_int4",
    "repack_int4",
    "repack_int8",
    "repack_plain",
    "rms_norm",
    "rms_norm_fp8",
    "rope_write_kv",
    "route_experts",
    "sample",
    "scale_logits",
    "scaled_mm",
    "scaled_mm_counters",
    "select",
    "silu_mul",
    "silu_mul_fp8",
    "skinny_gemm",
    "slot_table",
    "split_sums_bytes",
    "stage_fp8",
    "swap_ab_gemm",
    "tile_rows",
    "token_probs",
    "top_logprobs",
    "triton_min_block_size",
    "unpack_int4",
    "unpack_step_inputs",
    "update_step_inputs",
    "w4a8_sums_bytes",
    "w4a16_sums_bytes",
    "write_latent",
]
