// Arguments of slipstream_mixed_gemm_w4a8, as gemm/cuda/mixed_gemm_w4a8.py fills them. Pointers are device pointers.
// Pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

namespace slipstream {

struct MixedGemmW4a8Params {
  const void* x;                // [num_tokens, in_features] e4m3, row stride below
  const float* token_scale;     // [num_tokens]
  const float* totals;          // [groups of input features][128 tokens]: sums of a group's activations
  const void* codes;            // [blocks of 128][strips of 16 output features][1 KB], slipstream_kernels/w4a8_layout.py
  const void* words;            // [blocks, or one if is_channelwise][out_features][groups of a block]
  const float* channel_scale;   // [out_features]
  const void* bias;             // [out_features] of the result's type, or null
  void* out;                    // [num_tokens, out_features], fp16 or bf16
  int64_t x_row_stride;         // bytes, a multiple of 16
  int32_t num_tokens;
  int32_t out_features;
  int32_t in_features;
  int32_t warpgroups_m;           // the variant: 64 rows each of a pass of a CTA: 1, 2, 4
  int32_t splits;               // CTAs of a cluster, which share the summed dimension
  int32_t num_clusters;
  int32_t is_channelwise;       // one group a row
  int32_t out_is_half;
  int32_t is_dependent;
};

}  // namespace slipstream
