// The producer warps: bring the CTA's weights through the ring, alternating stages; a lane copies a row.
#pragma once

#include "ptx/bulk_copy.cuh"
#include "ptx/hopper_copy.cuh"
#include "pipeline/copy_pace.cuh"
#include "pipeline/skinny_gemm_passes.cuh"

namespace slipstream {

// ring: shared address of the stages; barriers: of the full barriers, with the empty ones behind them.
template <typename SHAPE>
__device__ __forceinline__ void produce(const SkinnyGemmParams& p, uint32_t ring, uint32_t barriers,
                                        PassSource<SHAPE> passes) {
  const int row = threadIdx.x % 32, producer = threadIdx.x / 32 - SHAPE::kWarps;
  const char* weight = static_cast<const char*>(p.weight);
  const uint64_t policy = evict_first_policy();
  PipelineState<SHAPE::kStages> state;
  const CopyPace pace(p.copy_pace, barriers + 8 * SHAPE::kStages);
  int next_producer = 0, num_stages = 0;
  passes.draws = threadIdx.x == 32 * SHAPE::kWarps;
  WorkRange pass;
  while (passes.next(pass)) {
#pragma unroll 1
    for (StageWalk<SHAPE> walk(p, pass); !walk.is_done(); walk.advance(), state.advance(), ++num_stages) {
      next_producer = next_producer + 1 == SHAPE::kProducers ? 0 : next_producer + 1;
      if (next_producer != producer) continue;
      const uint32_t full = barriers + 8 * state.stage, empty = full + 8 * SHAPE::kStages;
      const int num_rows = walk.num_rows();
      const uint32_t bytes = walk.chunk_bytes();
      wait_barrier(empty, state.parity ^ 1);
      if (num_stages < SHAPE::kStages) pace.wait(num_stages * SHAPE::kStageBytes);
      __syncwarp();   // lanes that copy nothing must not fall behind: they would miss a round
      if (row == 0) arrive_expecting(full, bytes * num_rows);
      if (row < num_rows) {
        copy_bulk(ring + state.stage * SHAPE::kStageBytes + row * SHAPE::kRowPitch, weight + walk.offset(row), bytes,
                  full, policy);
      }
    }
  }
  passes.close();
}

}  // namespace slipstream
