// The emulator's wgmma_few_columns.cuh.
#pragma once

#include "mma/wgmma_shared.cuh"

namespace slipstream {

template <int N>
void multiply_rows(float (&d)[N / 2], uint64_t a, uint64_t b, int adds) {
  multiply_shared<__nv_bfloat16, N>(d, a, b, adds);
}

template <int N>
void multiply_columns(float (&d)[N / 2], uint64_t a, uint64_t b) {
  multiply_slab<N>(d, a, b);
}

}  // namespace slipstream
