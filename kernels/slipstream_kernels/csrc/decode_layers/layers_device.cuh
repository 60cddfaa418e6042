// What the kernel of all layers asks of the hardware besides hopper_copy, bulk_copy and warp_mma: memory that other CTAs
// write, conversions, and the barrier of the grid. Thin; a CPU test puts its own in place of these files.
#pragma once

#include "ptx/bulk_copy.cuh"
#include "ptx/hopper_copy.cuh"
#include "ptx/memory_access.cuh"
#include "mma/warp_mma.cuh"

namespace slipstream {

// Past L1: in this kernel other CTAs write what is read so, and L1 would still hold a former layer's. And each time anew,
// which the assembler does not promise of weak loads (ld.global.cg), volatile or not.
__device__ __forceinline__ uint4 load_l2_16(const void* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_l2_8(const void* from) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
  return v;
}

// Rounded to nearest, beyond 448 to 448.
__device__ __forceinline__ uint16_t to_e4m3(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Brings the line to L2.
__device__ __forceinline__ void prefetch_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

// The largest of all lanes.
__device__ __forceinline__ uint32_t warp_most(uint32_t value) { return __reduce_max_sync(0xffffffffu, value); }

__device__ __forceinline__ float2 floats_of(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Ends a phase of this CTA: what its threads wrote, and a barrier of them brought together, can be seen by who awaits.
__device__ __forceinline__ void count_up(uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Release and acquire; __threadfence() orders more, and takes longer.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// A grid that waits for some seconds will wait for ever: an error then says so, where a hang would hold the device.
__device__ __forceinline__ void await_count(const uint32_t* counter, uint32_t count) {
  constexpr uint32_t kMostPolls = 1u << 23;
  uint32_t seen = 0;
  for (uint32_t poll = 0; poll < kMostPolls; ++poll) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    if (seen >= count) return;
  }
  __trap();
}

}  // namespace slipstream
