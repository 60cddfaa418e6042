// Arguments of slipstream_mixed_gemm, as gemm/cuda/mixed_gemm.py fills them. Pointers are device pointers.
// Pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

namespace slipstream {

struct MixedGemmParams {
  const void* x;                  // [num_tokens, in_features] of the format's Operand, row stride below
  const void* qweight;            // in the format's order (mixed_gemm_formats.cuh)
  const void* group_scales;       // 4 bits: packed words of scale and zero point, a row and group each
  const float* channel_scale;     // [out_features]
  const float* token_scale;       // W4A8: [num_tokens]
  float* activation_sums;         // W4A8: [tiles of tokens][groups of input features][128]; W4A16: a workspace (mixed_gemm_load.cuh,
                                  // split_rows.cuh)
  const void* bias;               // [out_features] of the result's type, or null
  void* permuted_x;               // W4A16: a workspace for x with the features of each 32 in the order of the products; in pairs
                                  // of e4m3: [columns of a tile, in_features]
  void* out;                      // [num_tokens, out_features, or half of them if gated]
  int64_t x_row_stride;           // bytes, a multiple of 16
  int32_t num_tokens, out_features, in_features;
  int32_t warpgroups_m;           // the variant: 64 rows each of a pass of a CTA: 1, 2, 4
  int32_t splits;                 // CTAs of a cluster, which share the input features
  int32_t num_clusters;           // a multiple of token_tiles
  int32_t token_tiles;            // clusters that take other tokens of the same output features; W4A8: 1
  int32_t is_gated;               // W8A16: out = silu(first half of the rows) * second half
  int32_t is_channelwise;         // 4 bits: group_scales has one group a row
  int32_t out_is_half;            // W4A8: fp16 results, else bf16
  int32_t is_dependent;
  int32_t copy_pace;              // bytes a clock of a CTA's early copies (copy_pace.cuh)
};

}  // namespace slipstream
