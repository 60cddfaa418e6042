// The order of accesses to global memory among CTAs, as thin inline PTX. Device code only; no framework header.
#pragma once

namespace slipstream {

__device__ __forceinline__ int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Orders what this thread and, before a barrier of the CTA, others wrote before what it writes next, for all of the GPU;
// and what it read before what is read after such a barrier. Half the price of __threadfence.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace slipstream
