// The producer warps: bring the CTA's weights through the ring, slot by slot in turn, a row per lane.
#pragma once

#include "bulk_copy.cuh"
#include "hopper_copy.cuh"
#include "stream_walk.cuh"

namespace slipstream {

template <typename SHAPE>
__device__ __forceinline__ void prefetch_slots(SlotWalk<SHAPE> walk, int num_slots) {
  const char* weight = static_cast<const char*>(walk.p.weight);
  const int row = threadIdx.x % 32;
  for (int i = 0; i < num_slots && !walk.is_done(); ++i, walk.advance()) {
    if (row < walk.num_rows()) prefetch_bulk(weight + walk.offset(row), walk.chunk_bytes());
  }
}

// ring: shared address of the slots; barriers: of the `filled` ones, the `emptied` ones after them.
template <typename SHAPE>
__device__ __forceinline__ void produce(const StreamParams& p, uint32_t ring, uint32_t barriers) {
  const int row = threadIdx.x % 32, producer = threadIdx.x / 32 - SHAPE::kWarps;
  const uint64_t policy = evict_first_policy();
  SlotWalk<SHAPE> walk(p, blockIdx.x);
  const char* weight = static_cast<const char*>(p.weight);
  RingPlace<SHAPE::kSlots> place;
#pragma unroll 1
  for (int index = 0; !walk.is_done(); ++index, walk.advance(), place.advance()) {
    if (index % SHAPE::kProducers != producer) continue;
    if (index == SHAPE::kSlots && p.prefetch_slots > 0) prefetch_slots(walk, p.prefetch_slots);
    const uint32_t filled = barriers + 8 * place.stage, emptied = filled + 8 * SHAPE::kSlots;
    const int num_rows = walk.num_rows();
    const uint32_t bytes = walk.chunk_bytes();
    wait_barrier(emptied, place.parity ^ 1);
    if (row == 0) arrive_expecting(filled, bytes * num_rows);
    if (row < num_rows) {
      copy_bulk(ring + place.stage * SHAPE::kSlotBytes + row * SHAPE::kRowPitch, weight + walk.offset(row), bytes, filled,
                policy);
    }
  }
}

}  // namespace slipstream
