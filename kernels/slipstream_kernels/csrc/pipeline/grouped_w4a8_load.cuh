// The producer warp: one bulk copy brings a block's weights for all tiles of a pass, another the rows of a stage.
#pragma once

#include "ptx/bulk_copy.cuh"
#include "ptx/dependent_launch.cuh"
#include "schedule/grouped_w4a8_shape.cuh"

namespace slipstream {

template <typename SHAPE>
struct GroupedW4A8Producer {
  const GroupedGemmParams& p;
  GroupedW4A8Memory<SHAPE> memory;
  const int* token_tile_ends;
  PermutedX<SHAPE> permuted{p};
  uint64_t policy = evict_first_policy();
  int lane = threadIdx.x % 32;

  __device__ __forceinline__ void run() const {
    Walk ahead(p, token_tile_ends), walk(p, token_tile_ends);
    int num_ahead = 0;
    for (; num_ahead < SHAPE::kStages && ahead.has_more; ++num_ahead, ahead.advance()) copy_weights(num_ahead, ahead);
    await_previous();
    for (int stage = 0; stage < num_ahead; ++stage, walk.advance()) copy_rows(stage, walk);
    PipelineState<SHAPE::kStages> state;
    state.parity = 1;   // the second time around
#pragma unroll 1
    for (; ahead.has_more; ahead.advance(), state.advance()) {
      wait_barrier(memory.empty(state.stage), state.parity ^ 1);
      copy_weights(state.stage, ahead);
      copy_rows(state.stage, ahead);
    }
  }

 private:
  using Walk = StageWalk<SHAPE>;

  // Sums come with the last of eight blocks.
  static __device__ __forceinline__ bool has_activation_sums(const Walk& at) {
    return (at.block + at.count()) % SHAPE::kSumBlocks == 0 || at.block + at.count() == at.blocks;
  }

  // One lane a block.
  __device__ __forceinline__ void copy_weights(int stage, const Walk& at) const {
    const uint32_t bytes = at.pass.num_items * SHAPE::kTileBytes, barrier = memory.full(stage);
    if (lane == 0) {
      arrive_expecting(barrier,
                       at.count() * (bytes + SHAPE::kRowBytes) + (has_activation_sums(at) ? SHAPE::kSumBytes : 0));
    }
    __syncwarp();
    if (lane >= at.count()) return;
    const int tiles = p.out_features / 16, first = at.pass.rows.expert * tiles + at.pass.item;
    const int64_t tile = int64_t{at.block + lane} * p.num_experts * tiles + first;
    copy_bulk(memory.weights(stage) + lane * SHAPE::kBlockBytes,
              reinterpret_cast<const char*>(p.qweight) + tile * SHAPE::kTileBytes, bytes, barrier, policy);
  }

  __device__ __forceinline__ void copy_rows(int stage, const Walk& at) const {
    const uint32_t barrier = memory.full(stage);
    if (lane == 0) {
      copy_bulk(memory.rows(stage), permuted.rows(at.pass.token_tile, at.block), at.count() * SHAPE::kRowBytes, barrier,
                keep_policy());
    } else if (lane == 1 && has_activation_sums(at)) {
      copy_bulk(memory.activation_sums(stage), permuted.activation_sums(at.pass.token_tile, at.block), SHAPE::kSumBytes,
                barrier, keep_policy());
    }
  }
};

}  // namespace slipstream
