// A consumer warpgroup of the streaming grouped GEMM: the 128 weight rows of a tile in two halves. Sums of FP8 leave the tensor
// cores every 128 columns (swap_ab_multiply.cuh says why), and are scaled there if scales are of blocks.
#pragma once

#include "mma/hopper_mma.cuh"
#include "mma/wgmma_shared.cuh"
#include "schedule/grouped_stream_shape.cuh"

namespace slipstream {

// Scales of the blocks of weights that a tile has: one of gate and one of up for each 128 columns, or one. Lane l loads those of
// chunk 32 i + l; lanes have their own chunks, so that they come while the warp waits for weights.
template <typename SHAPE>
class GroupedBlockScales {
 public:
  __device__ __forceinline__ GroupedBlockScales(const GroupedStreamParams& p, const GroupedTile& tile)
      : p_(p), first_(p.scale + (static_cast<int64_t>(tile.expert) * p.scale_rows + tile.feature_tile * SHAPE::kFeatures / 128) *
                                    p.scale_columns) {}

  // To be called for each chunk, by all lanes. of[1]: of up.
  __device__ __forceinline__ void get(int chunk, float (&of)[2]) {
    if (chunk % 32 == 0) load(chunk);
    of[0] = __shfl_sync(~0u, gate_, chunk % 32);
    of[1] = SHAPE::kGated ? __shfl_sync(~0u, up_, chunk % 32) : of[0];
  }

 private:
  __device__ __forceinline__ void load(int chunk) {
    const int own = min(chunk + static_cast<int>(threadIdx.x % 32), p_.in_features / SHAPE::kChunk - 1);
    gate_ = __ldg(first_ + own);
    if constexpr (SHAPE::kGated) up_ = __ldg(first_ + p_.out_features / 2 / 128 * p_.scale_columns + own);
  }

  const GroupedStreamParams& p_;
  const float* first_;
  float gate_ = 0.0f, up_ = 0.0f;
};

template <typename SHAPE>
struct GroupedStreamConsumer {
  using Sums = float[SHAPE::kHalves][SHAPE::kSums];

  const GroupedStreamParams& p;
  const GroupedStreamMemory<SHAPE> memory;

  // Tile `index` of the CTA, of which this warp was told.
  __device__ __forceinline__ void multiply(const GroupedTile& tile, int index, int num_chunks, Sums& sums) const {
    const uint32_t flip = load_shared_4(memory.flip());   // of the parity of weights
    PipelineState<SHAPE::kStages> state{index * num_chunks % SHAPE::kStages,
                                        static_cast<uint32_t>(index * num_chunks / SHAPE::kStages % 2)};
    GroupedBlockScales<SHAPE> scales(p, tile);
    clear(sums);
    if (index > 0) wait_barrier(memory.done((index - 1) % SHAPE::kWarpgroups), (index - 1) / SHAPE::kWarpgroups % 2);
#pragma unroll 1
    for (int chunk = 0; chunk < num_chunks; ++chunk, state.advance()) {
      float of_weights[2];
      if constexpr (SHAPE::kHasBlockScales) scales.get(chunk, of_weights);
      wait_barrier(memory.rows_full(state.stage), state.parity);
      wait_barrier(memory.weights_full(state.stage), state.parity ^ flip);
      fence_shared_for_engines();   // rows were written by ordinary copies
      if constexpr (SHAPE::kIsFp8) {
        Sums partial;
        multiply_stage(state.stage, partial, 0);
        if constexpr (SHAPE::kHasBlockScales) add_scaled(state.stage, of_weights, partial, sums);
        release(state.stage);
        if constexpr (!SHAPE::kHasBlockScales) add(partial, sums);
      } else {
        multiply_stage(state.stage, sums, 1);
        release(state.stage);
      }
    }
    if (threadIdx.x % 32 == 0) arrive(memory.done(index % SHAPE::kWarpgroups));
  }

 private:
  static __device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int half = 0; half < SHAPE::kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < SHAPE::kSums; ++i) sums[half][i] = 0.0f;
    }
  }

  // adds 0: sums are overwritten.
  __device__ __forceinline__ void multiply_stage(int stage, Sums& sums, int adds) const {
    const uint64_t weights = rows_operand(memory.weights(stage)), rows = rows_operand(memory.rows(stage));
#pragma unroll
    for (int half = 0; half < SHAPE::kHalves; ++half) pin(sums[half]);
    begin_products();
#pragma unroll
    for (int step = 0; step < SHAPE::kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < SHAPE::kHalves; ++half) {
        multiply_shared<typename SHAPE::Operand, SHAPE::kColumns>(sums[half], weights + 512 * half + 2 * step, rows + 2 * step,
                                                                  step > 0 ? 1 : adds);
      }
    }
    commit_products();
    wait_for_products<0>();
#pragma unroll
    for (int half = 0; half < SHAPE::kHalves; ++half) pin(sums[half]);
  }

  // By every warp, when nothing of a stage is read any more.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(memory.empty(stage));
  }

  static __device__ __forceinline__ void add(const Sums& partial, Sums& sums) {
#pragma unroll
    for (int half = 0; half < SHAPE::kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < SHAPE::kSums; ++i) sums[half][i] += partial[half][i];
    }
  }

  // of_weights: of gate and up, which have every other eight rows.
  __device__ __forceinline__ void add_scaled(int stage, const float (&of_weights)[2], const Sums& partial, Sums& sums) const {
#pragma unroll
    for (int group = 0; group < SHAPE::kColumns / 8; ++group) {
      const uint2 scales = load_shared_8(memory.row_scales(stage) + 4 * (8 * group + threadIdx.x % 4 * 2));
      const float of_rows[2] = {__uint_as_float(scales.x), __uint_as_float(scales.y)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = of_rows[i % 2] * of_weights[i / 2];
#pragma unroll
        for (int half = 0; half < SHAPE::kHalves; ++half) sums[half][4 * group + i] += partial[half][4 * group + i] * scale;
      }
    }
  }
};

}  // namespace slipstream
