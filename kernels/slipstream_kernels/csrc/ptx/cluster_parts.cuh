// For kernels whose clusters divide the output features among themselves, and the input features among their CTAs, which
// read each other's sums.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/memory_access.cuh"

namespace slipstream {

// In 32 bits: a division of 64 takes a thread a tenth of a microsecond.
__device__ __forceinline__ int part_of(uint32_t total, uint32_t index, uint32_t count) {
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
