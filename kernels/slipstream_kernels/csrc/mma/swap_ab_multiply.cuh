// The consumer warpgroups: 64 weight rows times all tokens at a time, with weights as the A operand.
//
// Sums of 16-bit products stay in the tensor cores' fp32 accumulators. Those of e4m3 have about 14 bits of fraction: they
// are promoted to fp32 registers every 128 columns (arXiv:2412.19437, 3.3.2), where scales of blocks are applied.
#pragma once

#include "mma/hopper_mma.cuh"
#include "mma/wgmma_shared.cuh"
#include "pipeline/dynamic_pipeline_state.cuh"
#include "schedule/swap_ab_shape.cuh"

namespace slipstream {

// of[tile * kHalves + half]: in the layout of wgmma_shared.cuh.
template <typename SHAPE>
struct SwapAbSums {
  float of[SHAPE::kBlocks][SHAPE::kBlockSums];
};

template <typename SHAPE>
struct SwapAbConsumer {
  using Product = typename SHAPE::Product;
  static constexpr int kBlocks = SHAPE::kBlocks;

  const SwapAbParams& p;
  const SwapAbMemory<SHAPE> memory;
  const SwapAbWork<SHAPE> work;
  const int warpgroup;
  DynamicPipelineState state = {};

  __device__ __forceinline__ void multiply_pass(const WorkRange& units, SwapAbSums<SHAPE>& sums) {
    if constexpr (SHAPE::kIsFp8) add_chunks(units, sums);
    else multiply_chunks(sums);
  }

 private:
  template <int BLOCKS, int SETS>
  using Sums = float[BLOCKS][SETS][SHAPE::kBlockSums];

  template <int BLOCKS, int SETS>
  static __device__ __forceinline__ void pin_all(Sums<BLOCKS, SETS>& sums) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
      for (int set = 0; set < SETS; ++set) pin(sums[block][set]);
    }
  }

  // Adds a block's sets of sums to the first.
  template <int SETS>
  static __device__ __forceinline__ void fold(float (&sums)[SETS][SHAPE::kBlockSums]) {
#pragma unroll
    for (int set = 1; set < SETS; ++set) {
#pragma unroll
      for (int i = 0; i < SHAPE::kBlockSums; ++i) sums[0][i] += sums[set][i];
    }
  }

  // A chunk's products of BLOCKS blocks from `first` on, interleaved so that neighbours add to different sums.
  template <int BLOCKS, int SETS, bool ADDS>
  __device__ __forceinline__ void multiply_chunk(int first, Sums<BLOCKS, SETS>& sums) const {
#pragma unroll
    for (int step = 0; step < SHAPE::kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < BLOCKS; ++i) {
        multiply_shared<Product, SHAPE::kBlockColumns>(sums[i][step % SETS], weights(first + i) + 2 * step,
                                                       tokens(first + i) + 2 * step, ADDS || step >= SETS);
      }
    }
  }

  // Weight rows of a block. Consecutive tiles go to different warpgroups, so that both have rows in a short pass.
  __device__ __forceinline__ uint64_t weights(int block) const {
    const int tile = block / SHAPE::kHalves * SHAPE::kWarpgroups + warpgroup;
    return rows_operand(memory.weights(state.stage) + tile * 64 * 128);
  }

  __device__ __forceinline__ uint64_t tokens(int block) const {
    return rows_operand(memory.tokens(state.stage) + block % SHAPE::kHalves * SHAPE::kBlockColumns * 128);
  }

  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 32 == 0) arrive(memory.empty(stage));
  }

  // Releases a stage when the products of the next one have been issued.
  __device__ __forceinline__ void multiply_chunks(SwapAbSums<SHAPE>& result) {
    Sums<kBlocks, SHAPE::kSets> sums = {};
    int last = -1;
#pragma unroll 1
    for (int chunk = work.begin_chunk; chunk < work.end_chunk; ++chunk) {
      wait_barrier(memory.full(state.stage), state.parity);
      pin_all<kBlocks, SHAPE::kSets>(sums);
      begin_products();
      multiply_chunk<kBlocks, SHAPE::kSets, true>(0, sums);
      commit_products();
      wait_for_products<1>();
      if (last >= 0) release(last);
      last = state.stage;
      state.advance(memory.num_stages);
    }
    wait_for_products<0>();
    pin_all<kBlocks, SHAPE::kSets>(sums);
    if (last >= 0) release(last);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      fold(sums[block]);
#pragma unroll
      for (int i = 0; i < SHAPE::kBlockSums; ++i) result.of[block][i] = sums[block][0][i];
    }
  }

  __device__ __forceinline__ void add_chunks(const WorkRange& units, SwapAbSums<SHAPE>& sums) {
    sums = {};
#pragma unroll 1
    for (int chunk = work.begin_chunk; chunk < work.end_chunk; ++chunk) {
      float weight_scales[SHAPE::kTiles][2];
      if constexpr (SHAPE::Format::kIsByBlocks) load_weight_scales(units, chunk, weight_scales);
      wait_barrier(memory.full(state.stage), state.parity);
#pragma unroll
      for (int first = 0; first < kBlocks; first += SHAPE::kPartialBlocks) {
        Sums<SHAPE::kPartialBlocks, SHAPE::kPartialSets> partial;
        pin_all<SHAPE::kPartialBlocks, SHAPE::kPartialSets>(partial);
        begin_products();
        multiply_chunk<SHAPE::kPartialBlocks, SHAPE::kPartialSets, false>(first, partial);
        commit_products();
        wait_for_products<0>();
        pin_all<SHAPE::kPartialBlocks, SHAPE::kPartialSets>(partial);
        if constexpr (!SHAPE::Format::kIsByBlocks) {
          if (first + SHAPE::kPartialBlocks == kBlocks) release(state.stage);
        }
#pragma unroll
        for (int i = 0; i < SHAPE::kPartialBlocks; ++i) {
          fold(partial[i]);
          add(first + i, partial[i][0], weight_scales, sums.of[first + i]);
        }
      }
      if constexpr (SHAPE::Format::kIsByBlocks) {
        __syncwarp();
        release(state.stage);   // its scales have been read
      }
      state.advance(memory.num_stages);
    }
  }

  __device__ __forceinline__ void add(int block, const float (&partial)[SHAPE::kBlockSums],
                                      const float (&weight_scales)[SHAPE::kTiles][2],
                                      float (&sums)[SHAPE::kBlockSums]) const {
    if constexpr (!SHAPE::Format::kIsByBlocks) {
#pragma unroll
      for (int i = 0; i < SHAPE::kBlockSums; ++i) sums[i] += partial[i];
      return;
    }
    const int first = block % SHAPE::kHalves * SHAPE::kBlockColumns + threadIdx.x % 4 * 2;
#pragma unroll
    for (int group = 0; group < SHAPE::kBlockGroups; ++group) {
      float token[2];
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(token[0]), "=f"(token[1])
                   : "r"(memory.stage_scales(state.stage) + 4 * (first + 8 * group)));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[4 * group + i] += partial[4 * group + i] * (token[i % 2] * weight_scales[block / SHAPE::kHalves][i / 2]);
      }
    }
  }

  // Scales of this thread's two rows of each tile.
  __device__ __forceinline__ void load_weight_scales(const WorkRange& units, int chunk,
                                                     float (&scales)[SHAPE::kTiles][2]) const {
#pragma unroll
    for (int tile = 0; tile < SHAPE::kTiles; ++tile) {
      const int unit = min(units.begin + unit_in_pass<SHAPE>(tile, warpgroup), p.num_units - 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scales[tile][half] = __ldg(p.scale + weight_row<SHAPE>(p, unit, half) / 128 * p.scale_stride + chunk);
      }
    }
  }
};

}  // namespace slipstream
