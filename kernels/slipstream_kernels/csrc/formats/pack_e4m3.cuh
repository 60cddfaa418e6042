// From fp32 to e4m3 as thin inline PTX. Device code only; no framework header.
#pragma once

#include <cstdint>

namespace slipstream {

// Four floats as e4m3, the first in the lowest byte.
__device__ __forceinline__ uint32_t pack_e4m3(float2 low, float2 high) {
  uint32_t packed;
  asm("{.reg .b16 l, h;\ncvt.rn.satfinite.e4m3x2.f32 l, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 h, %4, %3;\n"
      "mov.b32 %0, {l, h};}" : "=r"(packed) : "f"(low.x), "f"(low.y), "f"(high.x), "f"(high.y));
  return packed;
}

}  // namespace slipstream
