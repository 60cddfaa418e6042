// CTAs that share a unit leave their parts and count them, and the last one goes on: latent_join.cuh, latent_narrow_join.cuh.
#pragma once

#include "ptx/hopper_copy.cuh"
#include "ptx/part_counter.cuh"
#include "schedule/latent_work.cuh"

namespace slipstream {

constexpr int kPartsLeft = 8;         // named barrier
constexpr int kPartThreads = 256;     // of both warpgroups that multiply

// By all of these threads, which have left their part. Whether it was the unit's last. flag: a word of shared memory.
__device__ __forceinline__ bool has_left_last(const LatentParams& p, const LatentWork& work, int thread, uint32_t flag) {
  sync_threads(kPartsLeft, kPartThreads);
  if (thread == 0) {
    int32_t* arrived = p.arrivals + work.first_slot / 2;
    const bool is_last = count_part(arrived) == work.num_parts - 1;
    if (is_last) *arrived = 0;   // for the next launch
    store_shared_4(flag, static_cast<uint32_t>(is_last));
  }
  sync_threads(kPartsLeft, kPartThreads);
  return load_shared_4(flag) != 0;
}

}  // namespace slipstream
