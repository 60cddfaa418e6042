// The emulator's wgmma_shared.cuh.
#pragma once

#include "mma/warp_mma.cuh"
#include "warpgroup.h"

namespace slipstream {

template <typename T, int N>
void multiply_shared(float (&d)[N / 2], uint64_t a, uint64_t b, int adds) {
  emulator::multiply<T, N>(d, nullptr, a, b, false, adds);
}

template <int N>
void multiply_slab(float (&d)[N / 2], uint64_t a, uint64_t b) {
  emulator::multiply<__nv_bfloat16, N>(d, nullptr, a, b, false, 1, true);
}

}  // namespace slipstream
