// The consumer warpgroups of the streaming swap-AB GEMM: sums of a segment, promoted to fp32 registers every 128 columns
// (swap_ab_multiply.cuh says why).
#pragma once

#include "mma/hopper_mma.cuh"
#include "mma/stream_sums.cuh"
#include "mma/wgmma_shared.cuh"
#include "pipeline/dynamic_pipeline_state.cuh"
#include "schedule/swap_ab_stream_shape.cuh"

namespace slipstream {

template <typename SHAPE>
struct StreamConsumer {
  using Partial = float[SHAPE::kBlockSums];

  const StreamMemory<SHAPE> memory;
  const int warpgroup;
  DynamicPipelineState state = {};

  __device__ __forceinline__ void multiply(int num_chunks, StreamSums<SHAPE>& sums) {
    sums = {};
#pragma unroll 1
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      wait_barrier(memory.full(state.stage), state.parity);
#pragma unroll
      for (int half = 0; half < SHAPE::kHalves; ++half) {
        Partial partial;
        start_products(half, partial);
        wait_for_products<0>();
        pin(partial);
        if (half == SHAPE::kHalves - 1) release(state.stage);
#pragma unroll
        for (int i = 0; i < SHAPE::kBlockSums; ++i) sums.of[half][i] += partial[i];
      }
      state.advance(memory.num_stages);
    }
  }

 private:
  __device__ __forceinline__ void start_products(int half, Partial& partial) const {
    const uint64_t weights = rows_operand(memory.weights(state.stage) + warpgroup * 64 * 128);
    const uint64_t tokens = rows_operand(memory.tokens(state.stage) + half * SHAPE::kBlockColumns * 128);
    pin(partial);
    begin_products();
#pragma unroll
    for (int step = 0; step < SHAPE::kSteps; ++step) {
      multiply_shared<__nv_fp8_e4m3, SHAPE::kBlockColumns>(partial, weights + 2 * step, tokens + 2 * step, step > 0);
    }
    commit_products();
  }

  // By every warp, when its products, the only readers of a stage, have ended.
  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 32 == 0) arrive(memory.empty(stage));
  }
};

}  // namespace slipstream
