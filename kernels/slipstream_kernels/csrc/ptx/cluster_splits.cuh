// For split-K in a cluster: clusters divide the output features, the CTAs of a cluster the input features, and CTAs read each
// other's sums.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/memory_access.cuh"

namespace slipstream {

// The first of split `index` of `count` even splits. In 32 bits: a 64-bit division takes a thread 0.1 us.
__device__ __forceinline__ int split_begin(uint32_t total, uint32_t index, uint32_t count) {
  return static_cast<int>(total * index / count);
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ float4 load_own(uint32_t address) {
  const uint4 v = load_shared_16(address);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

}  // namespace slipstream
