// Counts the parts that CTAs leave for each other in global memory, as thin inline PTX. Device code only; no framework header.
#pragma once

namespace slipstream {

// Adds one to a counter, and returns what it was. What the CTA wrote before the caller's last barrier is seen by who counts
// later, behind a barrier of its own: one thread's fence in place of one of every thread.
__device__ __forceinline__ int count_part(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

}  // namespace slipstream
