// The consumer warpgroups of the streaming swap-AB GEMM: sums of a segment, promoted to fp32 registers every 128 columns
// (swap_ab_multiply.cuh says why).
#pragma once

#include "mma/hopper_mma.cuh"
#include "mma/wgmma_shared.cuh"
#include "schedule/swap_ab_stream_shape.cuh"

namespace slipstream {

// of[tile * kHalves + half]: in the layout of wgmma_shared.cuh.
template <typename SHAPE>
struct StreamSums {
  float of[SHAPE::kBlocks][SHAPE::kBlockSums];
};

template <typename SHAPE>
struct StreamConsumer {
  static constexpr int kInterleaved = SHAPE::kInterleaved;
  using Partial = float[kInterleaved][SHAPE::kBlockSums];

  const StreamMemory<SHAPE> memory;
  const int warpgroup;
  StreamState state = {};

  __device__ __forceinline__ void multiply(int num_chunks, StreamSums<SHAPE>& sums) {
    sums = {};
#pragma unroll 1
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      wait_barrier(memory.full(state.stage), state.parity);
#pragma unroll
      for (int turn = 0; turn < SHAPE::kTurns; ++turn) {
        Partial partial;
        start_products(turn * kInterleaved, partial);
        wait_for_products<0>();
        pin_all(partial);
        if (turn == SHAPE::kTurns - 1) release(state.stage);
        add(turn * kInterleaved, partial, sums);
      }
      state.advance(memory.num_stages);
    }
  }

 private:
  static __device__ __forceinline__ void pin_all(Partial& partial) {
#pragma unroll
    for (int i = 0; i < kInterleaved; ++i) pin(partial[i]);
  }

  __device__ __forceinline__ void start_products(int first, Partial& partial) const {
    pin_all(partial);
    begin_products();
#pragma unroll
    for (int step = 0; step < SHAPE::kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < kInterleaved; ++i) {
        multiply_shared<__nv_fp8_e4m3, SHAPE::kBlockColumns>(partial[i], weights(first + i) + 2 * step,
                                                             tokens(first + i) + 2 * step, step > 0);
      }
    }
    commit_products();
  }

  static __device__ __forceinline__ void add(int first, const Partial& partial, StreamSums<SHAPE>& sums) {
#pragma unroll
    for (int i = 0; i < kInterleaved; ++i) {
#pragma unroll
      for (int j = 0; j < SHAPE::kBlockSums; ++j) sums.of[first + i][j] += partial[i][j];
    }
  }

  __device__ __forceinline__ uint64_t weights(int block) const {
    const int tile = block / SHAPE::kHalves * SHAPE::kWarpgroups + warpgroup;
    return rows_operand(memory.weights(state.stage) + tile * 64 * 128);
  }

  __device__ __forceinline__ uint64_t tokens(int block) const {
    return rows_operand(memory.tokens(state.stage) + block % SHAPE::kHalves * SHAPE::kBlockColumns * 128);
  }

  // By every warp, when its products, the only readers of a stage, have ended.
  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 32 == 0) arrive(memory.empty(stage));
  }
};

}  // namespace slipstream
