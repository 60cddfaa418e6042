// Arguments of slipstream_w4a8_stream, as cuda/w4a8_stream.py fills them. Pointers are device pointers.
// Pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

namespace slipstream {

struct W4a8StreamParams {
  const void* x;                // [num_tokens, in_features] e4m3, row stride below
  const float* token_scale;     // [num_tokens]
  const void* codes;            // in the order of w4a8_layout.cuh
  const uint32_t* words;        // [blocks of 128, or 1][out_features][groups_per_block]: fp16 scale | zero << 16
  const float* channel_scale;   // [out_features]
  const void* bias;             // [out_features] of the result's type, or null
  void* out;                    // [num_tokens, out_features], fp16 or bf16
  int64_t x_row_stride;         // bytes, a multiple of 16
  int32_t num_tokens, out_features, in_features;
  int32_t columns;              // the variant: num_tokens rounded up
  int32_t groups_per_block;     // 1 (128 or whole rows), 2 (64): the variant
  int32_t is_channelwise;       // words have one row of groups
  int32_t out_is_half;          // else bf16
  int32_t splits;               // CTAs of a cluster, which share the summed dimension
  int32_t num_clusters, is_dependent;
};

}  // namespace slipstream
