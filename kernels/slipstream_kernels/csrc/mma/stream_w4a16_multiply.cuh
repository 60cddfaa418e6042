// The consumer warpgroups of the streaming W4A16 product: 64 weight rows each times all tokens of a tile. Both operands lie
// in shared memory, and sums stay in the tensor cores' registers until a segment ends.
#pragma once

#include "mma/hopper_mma.cuh"
#include "mma/stream_sums.cuh"
#include "mma/wgmma_shared.cuh"
#include "schedule/stream_w4a16_shape.cuh"

namespace slipstream {

template <typename SHAPE>
struct StreamW4A16Consumer {
  const StreamW4A16Memory<SHAPE> memory;
  const int warpgroup;
  PipelineState<SHAPE::kStages> state = {};

  // A slab is given back when the products of the one after it are under way.
  __device__ __forceinline__ void multiply(int num_chunks, StreamSums<SHAPE>& sums) {
    int before = state.stage;
#pragma unroll 1
    for (int slab = 0; slab < SHAPE::kSlabs * num_chunks; ++slab) {
      wait_barrier(memory.full(state.stage), state.parity);
      start_products(slab > 0, sums);
      wait_for_products<1>();
      if (slab > 0) release(before);
      before = state.stage;
      state.advance();
    }
    wait_for_products<0>();
#pragma unroll
    for (auto& half : sums.of) pin(half);
    release(before);
  }

 private:
  __device__ __forceinline__ void start_products(bool adds, StreamSums<SHAPE>& sums) const {
    const uint64_t weights = rows_operand(memory.weights(state.stage) + warpgroup * 64 * 128);
    const uint64_t tokens = rows_operand(memory.tokens(state.stage));
    begin_products();
#pragma unroll
    for (int step = 0; step < SHAPE::kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < SHAPE::kHalves; ++half) {
        const uint64_t of_half = tokens + half * (SHAPE::kBlockColumns * 128 >> 4);
        multiply_shared<typename SHAPE::Out, SHAPE::kBlockColumns>(sums.of[half], weights + 2 * step, of_half + 2 * step,
                                                                   adds || step > 0);
      }
    }
    commit_products();
  }

  // By every warp, when its products, the only readers of a stage, have ended.
  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 32 == 0) arrive(memory.empty(stage));
  }
};

}  // namespace slipstream
