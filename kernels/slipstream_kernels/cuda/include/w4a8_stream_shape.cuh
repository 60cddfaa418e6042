// Sizes of one variant of the product of 4-bit weights with some tens of FP8 rows, who does what, and where things lie
// in shared memory.
//
// A cluster owns consecutive strips of 16 output features and goes through them in passes of up to 16, one for each
// multiplying warp. Its CTAs have a part of the input features each. So activations are read once for 256 output
// features: an SM takes in some 40 bytes/ns, and with 128 of 64 tokens they would be as many bytes as the codes.
#pragma once

#include "cluster.cuh"
#include "hopper_copy.cuh"
#include "w4a8_stream_params.h"

namespace slipstream {

template <int COLUMNS, int GROUPS>
struct W4a8Shape {
  static constexpr int kColumns = COLUMNS, kGroups = GROUPS;   // tokens; groups of a block of 128 input features
  static constexpr int kStrips = 16, kSums = COLUMNS / 2;      // of a pass; of a thread
  static constexpr int kConsumers = 32 * kStrips, kThreads = kConsumers + 128;
  static constexpr int kLoaders = 2;   // warps: one takes 45 ns to issue a copy, the engine 28 to make it

  static constexpr int kBlocks = 2;          // of a stage
  static constexpr int kAdders = kBlocks;    // warps, that add activations up
  static constexpr int kBlockBytes = 1024, kStripBytes = kBlocks * kBlockBytes;
  static constexpr int kTokenBytes = COLUMNS * 128;              // of a block, as tensor copies swizzle them
  static constexpr int kWordBytes = kStrips * 16 * 4 * GROUPS;   // of a block
  static constexpr int kCodeOffset = kBlocks * kTokenBytes;
  static constexpr int kWordOffset = kCodeOffset + kStrips * kStripBytes;
  // Of each block, group and token: the sum of its activations.
  static constexpr int kTotalOffset = kWordOffset + kBlocks * kWordBytes;
  static constexpr int kStageBytes = kTotalOffset + 1024;
  static_assert(kBlocks * GROUPS * COLUMNS * 4 <= 1024);
  static_assert(kStageBytes % 1024 == 0);

  // Codes become e4m3 here, 64 rows x 128 bytes swizzled: one block is multiplied while the next is made.
  static constexpr int kTileBytes = 64 * 128, kTilesBytes = kStrips / 4 * 2 * kTileBytes;
  static constexpr int kRest = 227 * 1024 - 1024 - kTilesBytes;   // 1024: the base is aligned by hand
  static constexpr int kStages = kRest / (kStageBytes + 24) < 8 ? kRest / (kStageBytes + 24) : 8;
  static constexpr int kTileOffset = kStages * kStageBytes;
  static constexpr int kBarrierOffset = kTileOffset + kTilesBytes;
  static constexpr int kTotalBytes = kBarrierOffset + 24 * kStages + 1024;
  // Sums that CTAs exchange lie where the ring was.
  static_assert(kStages >= 3 && kConsumers * kSums * 4 <= kTileOffset);
};

template <typename SHAPE>
struct W4a8Memory {
  uint32_t base;

  __device__ __forceinline__ explicit W4a8Memory(uint32_t start) : base((start + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t tokens(int stage) const { return base + stage * SHAPE::kStageBytes; }
  __device__ __forceinline__ uint32_t codes(int stage) const { return tokens(stage) + SHAPE::kCodeOffset; }
  __device__ __forceinline__ uint32_t words(int stage) const { return tokens(stage) + SHAPE::kWordOffset; }
  __device__ __forceinline__ uint32_t tile(int warpgroup, int buffer) const {
    return base + SHAPE::kTileOffset + (2 * warpgroup + buffer) * SHAPE::kTileBytes;
  }
  __device__ __forceinline__ uint32_t totals(int stage, int block, int group) const {
    return tokens(stage) + SHAPE::kTotalOffset + (block * SHAPE::kGroups + group) * SHAPE::kColumns * 4;
  }
  __device__ __forceinline__ uint32_t filled(int stage) const { return base + SHAPE::kBarrierOffset + 24 * stage; }
  __device__ __forceinline__ uint32_t emptied(int stage) const { return filled(stage) + 8; }
  __device__ __forceinline__ uint32_t summed(int stage) const { return filled(stage) + 16; }
  // Of lane 0 of a warp's sums of 8 tokens; 16 bytes a lane.
  __device__ __forceinline__ uint32_t exchange(int strip, int group) const {
    return base + (group * SHAPE::kStrips + strip) * 512;
  }
};

__device__ __forceinline__ int part_of(int total, int index, int count) {
  return static_cast<int>(static_cast<int64_t>(total) * index / count);
}

// What a CTA multiplies.
struct W4a8Share {
  int rank;                      // in the cluster
  int begin_strip, end_strip;    // of the cluster
  int begin_block, end_block;    // of the CTA
  int num_passes;

  __device__ __forceinline__ explicit W4a8Share(const W4a8StreamParams& p) : rank(blockIdx.x % p.splits) {
    const int strips = p.out_features / 16, blocks = p.in_features / 128, cluster = blockIdx.x / p.splits;
    begin_strip = part_of(strips, cluster, p.num_clusters), end_strip = part_of(strips, cluster + 1, p.num_clusters);
    begin_block = part_of(blocks, rank, p.splits), end_block = part_of(blocks, rank + 1, p.splits);
    num_passes = (end_strip - begin_strip + 15) / 16;
  }

  __device__ __forceinline__ int pass_begin(int pass) const {
    return begin_strip + part_of(end_strip - begin_strip, pass, num_passes);
  }
};

// The walk over a CTA's stages.
struct W4a8Walk {
  const W4a8Share& share;
  int pass = 0, block;

  __device__ __forceinline__ explicit W4a8Walk(const W4a8Share& of) : share(of), block(of.begin_block) {}

  __device__ __forceinline__ bool is_done() const { return pass >= share.num_passes; }
  __device__ __forceinline__ int num_blocks() const { return min(2, share.end_block - block); }
  __device__ __forceinline__ int first_strip() const { return share.pass_begin(pass); }
  __device__ __forceinline__ int num_strips() const { return share.pass_begin(pass + 1) - first_strip(); }

  __device__ __forceinline__ void advance() {
    block += 2;
    if (block >= share.end_block) block = share.begin_block, ++pass;
  }
};

}  // namespace slipstream
