// Arguments of slipstream_mixed_gemm, as gemm/cuda/mixed_gemm.py fills them. Pointers are device pointers.
// Pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

namespace slipstream {

struct MixedGemmParams {
  const void* x;                // [num_tokens, in_features] of the products' type, row stride below
  const void* values;           // int8 [out_features, in_features], columns as slipstream_kernels/int8_layout.py orders them
  const float* channel_scale;   // [out_features]
  const void* bias;             // [out_features] of the result's type, or null
  void* out;                    // [num_tokens, out_features, or half of them if gated], of the products' type
  int64_t x_row_stride;         // bytes, a multiple of 16
  int32_t num_tokens, out_features, in_features;
  int32_t warpgroups_m;           // the variant: 64 rows each of a pass of a CTA: 1, 2, 4
  int32_t splits;               // CTAs of a cluster, which share the summed dimension
  int32_t num_clusters;         // a multiple of token_tiles
  int32_t token_tiles;          // clusters that share out tokens, not output features
  int32_t is_gated;             // strips are 8 rows of gate and the 8 of up: out = silu(gate) * up
  int32_t is_dependent;
};

}  // namespace slipstream
