// The multiplying warpgroups. A lane's weights become operands in its registers, one phase while the products of the one
// before are under way: no expanded weight goes through shared memory.
#pragma once

#include "schedule/mixed_gemm_shape.cuh"
#include "mma/hopper_mma.cuh"
#include "mma/wgmma_fragments.cuh"

namespace slipstream {

template <typename SHAPE>
struct MixedGemmConsumer {
  using Format = typename SHAPE::Format;
  static constexpr int kSums = SHAPE::kSums, kPhases = Format::kPhases;
  MixedGemmMemory<SHAPE> memory;
  const MixedGemmShare<SHAPE>& share;
  int warpgroup_m, warpgroup_k;
  RingPlace<SHAPE::kStages> place;
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  Format weights;
  uint32_t a[2][8];   // operands of two phases

  // strips: of the pass.
  __device__ __forceinline__ void multiply_pass(int strips, float (&sums)[kSums]) {
    const int mine = (share.num_blocks() - warpgroup_k + SHAPE::kWarpgroupsK - 1) / SHAPE::kWarpgroupsK;
    int left = share.num_stages();
    if (4 * warpgroup_m < strips && mine > 0) left -= multiply_blocks(mine, sums);
    for (; left > 0; --left) await(), release();
  }

 private:
  static constexpr int kOwnBlocks = SHAPE::kBlocks / SHAPE::kWarpgroupsK;   // of a stage

  __device__ __forceinline__ void await() const { wait_barrier(memory.full(place.stage), place.parity); }

  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane == 0) arrive(memory.empty(place.stage));
    place.advance();
  }

  // Returns how many stages were passed.
  __device__ __forceinline__ int multiply_blocks(int count, float (&sums)[kSums]) {
    int own = 0, stages = 0;   // of the stage's blocks
    await();
    load(place.stage, block_of(0));
    weights.expand(0, a[0]);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const bool is_last = i + 1 == count, is_end = is_last || own + 1 == kOwnBlocks;
      multiply_block(place.stage, block_of(own), i > 0, sums, [&] {
        if (is_last) return;
        RingPlace<SHAPE::kStages> next = place;
        if (is_end) next.advance(), wait_barrier(memory.full(next.stage), next.parity);
        load(next.stage, block_of(is_end ? 0 : own + 1));
        wait_for_products<1>();
        pin_weights();
        weights.expand(0, a[0]);
      });
      own = is_end ? 0 : own + 1;
      if (is_end) release(), ++stages;
    }
    return stages;
  }

  __device__ __forceinline__ int block_of(int own) const { return warpgroup_k + SHAPE::kWarpgroupsK * own; }

  __device__ __forceinline__ void load(int stage, int block) {
    weights.load(memory.weights(stage, block, 4 * warpgroup_m + warp), lane);
  }

  // sums += the block's products. ahead(): makes the next block's first operands while the last products are under way.
  template <typename AHEAD>
  __device__ __forceinline__ void multiply_block(int stage, int block, bool adds, float (&sums)[kSums],
                                                 const AHEAD& ahead) {
#pragma unroll
    for (int phase = 0; phase < kPhases; ++phase) {
      begin_products();
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int step = 2 * phase + j, slab = step / 4;
        const uint32_t tokens = memory.tokens(stage) + (block * SHAPE::kSlabs + slab) * SHAPE::kColumns * 128;
        const uint64_t b = rows_operand(tokens) + 2 * (step % 4);
        multiply_fragment<typename SHAPE::Operand, SHAPE::kColumns>(sums, a[phase % 2] + 4 * j, b, adds || phase + j > 0);
      }
      commit_products();
      if (phase + 1 < kPhases) {
        if (phase > 0) wait_for_products<1>();
        pin_weights();
        weights.expand(phase + 1, a[(phase + 1) % 2]);
      }
    }
    ahead();
    wait_for_products<0>();
    pin(sums);
  }

  // Operands are made after the wait that is written before.
  __device__ __forceinline__ void pin_weights() {
#pragma unroll
    for (auto& v : weights.raw) asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory");
  }
};

}  // namespace slipstream
