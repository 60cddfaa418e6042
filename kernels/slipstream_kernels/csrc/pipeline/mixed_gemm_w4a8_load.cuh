// The loading warp: codes of a block, all strips of the pass, by one bulk copy, their words by another; tokens of a stage
// by one tensor copy.
#pragma once

#include "ptx/bulk_copy.cuh"
#include "ptx/dependent_launch.cuh"
#include "schedule/mixed_gemm_w4a8_shape.cuh"

namespace slipstream {

// Copies the map's box of blocks from z on; what lies outside of the tensor becomes zero.
__device__ __forceinline__ void copy_blocks(uint32_t to, const CUtensorMap* map, uint32_t barrier, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(0), "r"(z), "l"(kReadOften) : "memory");
}

template <typename SHAPE>
struct W4a8Producer {
  const MixedGemmW4a8Params& p;
  const CUtensorMap& map;
  W4a8Memory<SHAPE> memory;
  const W4a8Share<SHAPE>& share;
  uint64_t policy = evict_first_policy();
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
    const W4a8Share<SHAPE>& share;
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

  // A lane each copy. Tokens are announced too: whole boxes, also beyond the last block.
  __device__ __forceinline__ void copy_weights(int stage, const Walk& walk) const {
    using Codes = typename SHAPE::Codes;
    const uint32_t code_bytes = walk.strips * Codes::kCodeBytes, word_bytes = walk.strips * Codes::kWordBytes;
    const uint32_t barrier = memory.full(stage);
    if (lane == 0) {
      const uint32_t of_block = code_bytes + word_bytes + SHAPE::kTotalsBytes;
      arrive_expecting(barrier, walk.blocks() * of_block + SHAPE::kBlocks * SHAPE::kTokenBytes);
    }
    __syncwarp();
    const int strips = p.out_features / 16, block = lane % SHAPE::kBlocks;
    if (lane >= 2 * SHAPE::kBlocks || block >= walk.blocks()) return;
    if (lane < SHAPE::kBlocks) {
      const int64_t strip = int64_t{walk.block + block} * strips + walk.strip;
      copy_bulk(memory.codes(stage, block, 0), static_cast<const char*>(p.codes) + strip * Codes::kCodeBytes, code_bytes,
                barrier, policy);
    } else {
      const int64_t strip = int64_t{p.is_channelwise != 0 ? 0 : walk.block + block} * strips + walk.strip;
      copy_bulk(memory.words(stage, block, 0), static_cast<const char*>(p.words) + strip * Codes::kWordBytes, word_bytes,
                barrier, policy);
    }
  }

  __device__ __forceinline__ void copy_tokens(int stage, const Walk& walk) const {
    if (lane == 0) {
      copy_blocks(memory.tokens(stage), &map, memory.full(stage), walk.block);
    } else if (lane == 1) {
      const float* from = p.totals + walk.block * (SHAPE::kTotalsBytes / 4);
      copy_bulk(memory.totals(stage, 0), from, walk.blocks() * SHAPE::kTotalsBytes, memory.full(stage), keep_policy());
    }
  }
};

}  // namespace slipstream
