// The producer warps: bring the CTA's weights through the ring, slot by slot in turn, a row per lane.
#pragma once

#include "ptx/bulk_copy.cuh"
#include "ptx/hopper_copy.cuh"
#include "pipeline/skinny_gemm_passes.cuh"

namespace slipstream {

// ring: shared address of the slots; barriers: of the `filled` ones, the `emptied` ones after them.
template <typename SHAPE>
__device__ __forceinline__ void produce(const SkinnyGemmParams& p, uint32_t ring, uint32_t barriers,
                                        PassSource<SHAPE> passes) {
  const int row = threadIdx.x % 32, producer = threadIdx.x / 32 - SHAPE::kWarps;
  const char* weight = static_cast<const char*>(p.weight);
  const uint64_t policy = evict_first_policy();
  RingPlace<SHAPE::kSlots> place;
  int turn = 0;
  passes.draws = threadIdx.x == 32 * SHAPE::kWarps;
  UnitRange pass;
  while (passes.next(pass)) {
#pragma unroll 1
    for (SlotWalk<SHAPE> walk(p, pass); !walk.is_done(); walk.advance(), place.advance()) {
      turn = turn + 1 == SHAPE::kProducers ? 0 : turn + 1;
      if (turn != producer) continue;
      const uint32_t filled = barriers + 8 * place.stage, emptied = filled + 8 * SHAPE::kSlots;
      const int num_rows = walk.num_rows();
      const uint32_t bytes = walk.chunk_bytes();
      wait_barrier(emptied, place.parity ^ 1);
      if (row == 0) arrive_expecting(filled, bytes * num_rows);
      if (row < num_rows) {
        copy_bulk(ring + place.stage * SHAPE::kSlotBytes + row * SHAPE::kRowPitch, weight + walk.offset(row), bytes,
                  filled, policy);
      }
    }
  }
  passes.close();
}

}  // namespace slipstream
