// Copies of boxes of five dimensions; those of fewer: hopper_copy.cuh, cluster.cuh. Device code only; no framework header.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace slipstream {

// Copies the map's box at (x, y, z, w, v) to shared memory; what lies outside of the tensor becomes zero.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t hint, int x,
                                         int y, int z, int w, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z),
      "r"(w), "r"(v), "l"(hint) : "memory");
}

}  // namespace slipstream
