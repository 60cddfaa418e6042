// The passes of a CTA: an equal part of all, or those that it takes from a queue, so that SMs which memory serves faster do
// more. Producers and consumers each walk the same passes.
#pragma once

#include "ptx/dependent_launch.cuh"
#include "ptx/hopper_copy.cuh"
#include "schedule/skinny_gemm_walk.cuh"
#include "mma/warp_mma.cuh"

namespace slipstream {

// From the queue: the first two passes follow from the CTA's number, so that the ring fills before the kernel before
// has ended; the others are drawn after that, as the queue is that kernel's too. One lane of the CTA draws and posts
// them.
template <typename SHAPE>
struct PassSource {
  const SkinnyGemmParams& p;
  uint32_t barriers;         // shared address, one for each of kMail entries
  volatile int* entries;     // shared
  bool draws = false;        // this lane
  int count = 0;

  __device__ __forceinline__ bool next(UnitRange& pass) {
    if (p.queue == nullptr) return next_of_share(pass);
    const int index = count < 2 ? blockIdx.x + count * p.num_ctas : next_index();
    ++count;
    if (index >= num_passes<SHAPE>(p)) return false;
    pass = pass_of_index<SHAPE>(p, index);
    return true;
  }

  // Once per CTA, after the last draw: the last CTA leaves the queue as it was.
  __device__ __forceinline__ void close() const {
    if (p.queue == nullptr || !draws) return;
    __threadfence();
    if (atomicAdd(p.queue + 1, 1) != p.num_ctas - 1) return;
    p.queue[0] = 0;
    p.queue[1] = 0;
  }

 private:
  __device__ __forceinline__ bool next_of_share(UnitRange& pass) {
    const UnitRange cta = units_of_cta(p, blockIdx.x);
    const int begin = cta.begin + count * SHAPE::kUnitsPerPass;
    ++count;
    if (begin >= cta.end) return false;
    pass = pass_at<SHAPE>(begin, cta);
    return true;
  }

  __device__ __forceinline__ int next_index() {
    const int letter = count - 2, entry = letter % SHAPE::kMail;
    if (draws) {
      if (letter == 0) await_previous();
      entries[entry] = 2 * p.num_ctas + atomicAdd(p.queue, 1);
      arrive(barriers + 8 * entry);
    }
    wait_barrier(barriers + 8 * entry, letter / SHAPE::kMail % 2);
    return entries[entry];
  }
};

}  // namespace slipstream
