// The passes of a CTA: an equal part of all, or those that it draws from a queue, so that SMs which memory serves faster do
// more. Producers and consumers walk the same passes.
#pragma once

#include "ptx/dependent_launch.cuh"
#include "ptx/hopper_copy.cuh"
#include "schedule/skinny_gemm_walk.cuh"
#include "mma/warp_mma.cuh"

namespace slipstream {

// With a queue, the first two passes follow from the CTA's number, so that the ring fills while the kernel before still
// runs; that kernel uses the queue too, so further passes are drawn after its end. One lane of the CTA draws a pass and
// stores it for all warps.
template <typename SHAPE>
struct PassSource {
  const SkinnyGemmParams& p;
  uint32_t barriers;         // shared address, one for each of kQueueEntries entries
  volatile int* entries;     // shared
  bool draws = false;        // whether this lane draws
  int count = 0;

  __device__ __forceinline__ bool next(WorkRange& pass) {
    if (p.queue == nullptr) return next_of_split(pass);
    const int index = count < 2 ? blockIdx.x + count * p.num_ctas : next_index();
    ++count;
    if (index >= num_passes<SHAPE>(p)) return false;
    pass = pass_of_index<SHAPE>(p, index);
    return true;
  }

  // Once a CTA, after its last draw: the last CTA resets the queue.
  __device__ __forceinline__ void close() const {
    if (p.queue == nullptr || !draws) return;
    __threadfence();
    if (atomicAdd(p.queue + 1, 1) != p.num_ctas - 1) return;
    p.queue[0] = 0;
    p.queue[1] = 0;
  }

 private:
  __device__ __forceinline__ bool next_of_split(WorkRange& pass) {
    const WorkRange cta = outputs_of_cta(p, blockIdx.x);
    const int begin = cta.begin + count * SHAPE::kOutputsPerPass;
    ++count;
    if (begin >= cta.end) return false;
    pass = pass_at<SHAPE>(begin, cta);
    return true;
  }

  __device__ __forceinline__ int next_index() {
    const int drawn = count - 2, entry = drawn % SHAPE::kQueueEntries;
    if (draws) {
      if (drawn == 0) await_previous();
      entries[entry] = 2 * p.num_ctas + atomicAdd(p.queue, 1);
      arrive(barriers + 8 * entry);
    }
    wait_barrier(barriers + 8 * entry, drawn / SHAPE::kQueueEntries % 2);
    return entries[entry];
  }
};

}  // namespace slipstream
