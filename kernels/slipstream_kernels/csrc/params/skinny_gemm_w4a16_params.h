// Arguments of slipstream_skinny_gemm_w4a16 and slipstream_int4_dequantise, as gemm/cuda/skinny_gemm_w4a16.py fills
// them.
// Device pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

namespace slipstream {

struct SkinnyGemmW4A16Params {
  const void* x;                // [num_tokens, in_features] bf16 or fp16, row stride below
  const uint4* qweight;           // in the order of w4a8_layout.cuh
  const uint32_t* group_scales;        // [blocks of 128, or 1][out_features][groups_per_block]
  const uint32_t* tile_scales;  // the same as [out_features / 16][blocks, or 1][16][groups_per_block]
  const float* channel_scale;   // [out_features]
  const void* bias;             // [out_features] of the result's type, or null
  void* out;                    // [num_tokens, out_features]
  int64_t x_row_stride;         // elements, a multiple of 16 bytes
  int32_t num_tokens, out_features, in_features;
  int32_t columns;              // the variant: num_tokens rounded up
  int32_t groups_per_block;     // 1 (128 or whole rows), 2 (64): the variant
  int32_t is_channelwise;       // group_scales has one group a row
  int32_t out_is_half;          // int4_dequantise: fp16, else bf16
  int32_t num_ctas, ctas_per_sm, is_dependent;
  int32_t is_gated;             // skinny_gemm_w4a16: out = silu(first half of the rows) * second half
};

}  // namespace slipstream
