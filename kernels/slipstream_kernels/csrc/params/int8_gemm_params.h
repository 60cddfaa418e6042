// Arguments of slipstream_int8_gemm, as gemm/cuda/int8_gemm.py fills them. Pointers are device pointers.
#pragma once

#include <cstdint>

namespace slipstream {

struct Int8GemmParams {
  const void* x;                // [num_tokens, in_features] int8
  const float* token_scale;     // [num_tokens]
  const void* weight;           // [out_features, in_features] int8
  const float* channel_scale;   // [out_features]
  const void* bias;             // [out_features] of the result's type, or null
  void* out;                    // [num_tokens, out_features]
  int32_t num_tokens, out_features, in_features;
  int32_t device, num_sms, is_dependent;
};

}  // namespace slipstream
