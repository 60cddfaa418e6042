// Arguments of slipstream_w4a8_gemm, as gemm/cuda/w4a8_gemm.py fills them. Pointers are device pointers.
#pragma once

#include <cstdint>

namespace slipstream {

struct W4a8Params {
  const void* x;                // [num_tokens, in_features] e4m3
  const float* token_scale;     // [num_tokens]
  const void* qweight;          // in the order of w4a8_layout.cuh
  const void* group_scales;     // [in_features / tiled_group][out_features] of 1 or 2: fp16 512 * scale | fp16 -zero / 512 << 16
  const float* channel_scale;   // [out_features]
  const void* bias;             // [out_features] of the result's type, or null
  void* out;                    // [num_tokens, out_features]
  int32_t num_tokens, out_features, in_features;
  int32_t tiled_group;          // 128 (one group of 128, or two of 64), or in_features
  int32_t device, num_sms, is_dependent;
};

}  // namespace slipstream
