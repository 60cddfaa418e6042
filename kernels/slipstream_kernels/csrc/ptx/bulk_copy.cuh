// One-dimensional bulk copies: rows of bytes from global memory to shared memory or L2, without a tensor map.
#pragma once

#include <cstdint>

namespace slipstream {

// L2 drops lines under this policy first: weights are read once per step, other data stays.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// L2 keeps lines under this policy longest: every CTA reads the same activations.
__device__ __forceinline__ uint64_t keep_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies `bytes` (a multiple of 16, as both addresses) and counts them on `barrier`.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

// Brings `bytes` (a multiple of 16, as the address) to the L2 cache.
__device__ __forceinline__ void prefetch_bulk(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

}  // namespace slipstream
