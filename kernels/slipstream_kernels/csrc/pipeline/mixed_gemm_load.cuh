// The loading warp: rows of weights, all strips of the pass, by tensor copies of four strips and of one; tokens of a stage
// by one tensor copy.
#pragma once

#include "ptx/dependent_launch.cuh"
#include "schedule/mixed_gemm_shape.cuh"

namespace slipstream {

// Copies the map's box at (0, y, z); what lies outside of the tensor becomes zero.
__device__ __forceinline__ void copy_slabs(uint32_t to, const CUtensorMap* map, uint32_t barrier, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to), "l"(map), "r"(barrier), "r"(0), "r"(y), "r"(z), "l"(kReadOften)
      : "memory");
}

struct MixedGemmMaps {
  CUtensorMap tokens, four_strips, one_strip;
};

template <typename SHAPE>
struct MixedGemmProducer {
  const MixedGemmParams& p;
  const MixedGemmMaps& maps;
  MixedGemmMemory<SHAPE> memory;
  const MixedGemmShare<SHAPE>& share;
  uint64_t policy = p.token_tiles > 1 ? kReadNormally : kReadOnce;   // other tokens' clusters read weights, too
  int lane = threadIdx.x % 32;

  __device__ __forceinline__ void run() const {
    Walk ahead{share}, walk{share};
    int filled = 0;
    for (; filled < SHAPE::kStages && !ahead.is_done(); ++filled, ahead.advance()) copy_weights(filled, ahead);
    await_previous();
    for (int stage = 0; stage < filled; ++stage, walk.advance()) copy_tokens(stage, walk);
    RingPlace<SHAPE::kStages> place;
    place.parity = 1;   // the second time around
#pragma unroll 1
    for (; !ahead.is_done(); ahead.advance(), place.advance()) {
      wait_barrier(memory.empty(place.stage), place.parity ^ 1);
      copy_weights(place.stage, ahead);
      copy_tokens(place.stage, ahead);
    }
  }

 private:
  struct Walk {
    const MixedGemmShare<SHAPE>& share;
    int pass = 0, block = share.begin_block, strip = share.pass_begin(0), strips = share.pass_begin(1) - strip;

    __device__ __forceinline__ bool is_done() const { return pass >= share.num_passes || share.num_blocks() == 0; }
    __device__ __forceinline__ int blocks() const { return min(SHAPE::kBlocks, share.end_block - block); }

    __device__ __forceinline__ void advance() {
      block += SHAPE::kBlocks;
      if (block < share.end_block) return;
      block = share.begin_block, ++pass;
      if (pass < share.num_passes) strip = share.pass_begin(pass), strips = share.pass_begin(pass + 1) - strip;
    }
  };

  // A lane each box of a block. Tokens are announced too: whole boxes, also beyond the last block.
  __device__ __forceinline__ void copy_weights(int stage, const Walk& walk) const {
    if (lane == 0) {
      arrive_expecting(memory.full(stage), walk.blocks() * walk.strips * SHAPE::Format::kStripBytes +
                                                 SHAPE::kBlocks * SHAPE::kTokenBytes);
    }
    __syncwarp();
    const int fours = walk.strips / 4, ones = walk.strips % 4, strip = lane < fours ? 4 * lane : 3 * fours + lane;
    if (lane >= fours + ones) return;
    const CUtensorMap* map = lane < fours ? &maps.four_strips : &maps.one_strip;
#pragma unroll
    for (int i = 0; i < SHAPE::kBlocks; ++i) {
      if (i >= walk.blocks()) break;
      copy_box(memory.weights(stage, i, strip), map, memory.full(stage), policy, 128 * (walk.block + i), 0, 0,
               walk.strip + strip);
    }
  }

  __device__ __forceinline__ void copy_tokens(int stage, const Walk& walk) const {
    if (lane != 0) return;
    copy_slabs(memory.tokens(stage), &maps.tokens, memory.full(stage), share.first_token, walk.block * SHAPE::kSlabs);
  }
};

}  // namespace slipstream
