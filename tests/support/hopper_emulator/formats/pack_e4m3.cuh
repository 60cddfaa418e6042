// The emulator's pack_e4m3.cuh.
#pragma once

#include <cuda_fp8.h>
#include <vector_types.h>

#include <cstdint>

namespace slipstream {

inline uint32_t pack_e4m3(float2 low, float2 high) {
  const uint32_t pairs[2] = {__nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3),
                             __nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3)};
  return pairs[0] | pairs[1] << 16;
}

}  // namespace slipstream
