// The emulator's wgmma_values.cuh.
#pragma once

#include "mma/warp_mma.cuh"
#include "warpgroup.h"

namespace slipstream {

inline void multiply_values(float (&d)[128], const uint32_t* a, uint64_t b) {
  emulator::multiply<__nv_bfloat16, 256>(d, a, 0, b, true, 1);
}
inline void multiply_values(float (&d)[128], uint64_t a, uint64_t b) {
  emulator::multiply<__nv_bfloat16, 256>(d, nullptr, a, b, true, 1);
}
inline void multiply_values(float (&d)[64], const uint32_t* a, uint64_t b) {
  emulator::multiply<__nv_bfloat16, 128>(d, a, 0, b, true, 1);
}
inline void multiply_values(float (&d)[64], uint64_t a, uint64_t b) {
  emulator::multiply<__nv_bfloat16, 128>(d, nullptr, a, b, true, 1);
}

}  // namespace slipstream
