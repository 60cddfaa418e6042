// The emulator's wgmma_fragments.cuh.
#pragma once

#include "mma/warp_mma.cuh"
#include "warpgroup.h"

namespace slipstream {

template <typename T, int N>
void multiply_fragment(float (&d)[N / 2], const uint32_t* a, uint64_t b, int adds) {
  emulator::multiply<T, N>(d, a, 0, b, false, adds);
}

}  // namespace slipstream
