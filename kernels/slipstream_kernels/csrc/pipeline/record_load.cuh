// The loading warp: records of a block, all strips of the pass, by one bulk copy; rows of a stage by another.
#pragma once

#include "ptx/bulk_copy.cuh"
#include "ptx/dependent_launch.cuh"
#include "schedule/record_shape.cuh"

namespace slipstream {

template <typename SHAPE>
struct RecordLoader {
  const ExpertParams& p;
  RecordMemory<SHAPE> memory;
  const int* tiles_until;
  GatheredTiles<SHAPE> tiles{p};
  uint64_t policy = evict_first_policy();
  int lane = threadIdx.x % 32;

  __device__ __forceinline__ void run() const {
    Walk ahead(p, tiles_until), walk(p, tiles_until);
    int filled = 0;
    for (; filled < SHAPE::kStages && ahead.has_more; ++filled, ahead.advance()) copy_records(filled, ahead);
    await_previous();
    for (int stage = 0; stage < filled; ++stage, walk.advance()) copy_rows(stage, walk);
    RingPlace<SHAPE::kStages> place;
    place.parity = 1;   // the second time around
#pragma unroll 1
    for (; ahead.has_more; ahead.advance(), place.advance()) {
      wait_barrier(memory.empty(place.stage), place.parity ^ 1);
      copy_records(place.stage, ahead);
      copy_rows(place.stage, ahead);
    }
  }

 private:
  using Walk = StageWalk<SHAPE>;

  // Totals come with the last of eight blocks.
  static __device__ __forceinline__ bool has_totals(const Walk& at) {
    return (at.block + at.count()) % SHAPE::kTotalBlocks == 0 || at.block + at.count() == at.blocks;
  }

  // A lane each block.
  __device__ __forceinline__ void copy_records(int stage, const Walk& at) const {
    const uint32_t bytes = at.pass.num_units * SHAPE::kRecordBytes, barrier = memory.full(stage);
    if (lane == 0) {
      arrive_expecting(barrier, at.count() * (bytes + SHAPE::kRowBytes) + (has_totals(at) ? SHAPE::kSumBytes : 0));
    }
    __syncwarp();
    if (lane >= at.count()) return;
    const int strips = p.out_features / 16, strip = at.pass.rows.expert * strips + at.pass.unit;
    const int64_t record = int64_t{at.block + lane} * p.num_experts * strips + strip;
    copy_bulk(memory.records(stage) + lane * SHAPE::kBlockBytes,
              reinterpret_cast<const char*>(p.codes) + record * SHAPE::kRecordBytes, bytes, barrier, policy);
  }

  __device__ __forceinline__ void copy_rows(int stage, const Walk& at) const {
    const uint32_t barrier = memory.full(stage);
    if (lane == 0) {
      copy_bulk(memory.rows(stage), tiles.rows(at.pass.tile, at.block), at.count() * SHAPE::kRowBytes, barrier,
                keep_policy());
    } else if (lane == 1 && has_totals(at)) {
      copy_bulk(memory.totals(stage), tiles.totals(at.pass.tile, at.block), SHAPE::kSumBytes, barrier, keep_policy());
    }
  }
};

}  // namespace slipstream
