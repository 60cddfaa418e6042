// Sizes of one variant of the product of 4-bit weights in the order of registers with few FP8 rows, who does what, and
// where things lie in shared memory.
//
// A cluster owns consecutive strips of 16 output features and goes through them in passes of up to 64 for each of
// WARPGROUPS_M warpgroups. Its CTAs have a part of the input features each; inside a CTA the warpgroups share out
// blocks of 128 where they outnumber the row groups. So narrow outputs need no sums that cross CTAs.
#pragma once

#include "ptx/cluster.cuh"
#include "ptx/cluster_parts.cuh"
#include "formats/mixed_gemm_w4a8_codes.cuh"
#include "params/mixed_gemm_w4a8_params.h"
#include "ptx/hopper_copy.cuh"

namespace slipstream {

template <int COLUMNS, int GROUPS, int WARPGROUPS_M>
struct W4a8Shape {
  using Codes = W4a8Codes<GROUPS>;
  static constexpr int kColumns = COLUMNS, kGroups = GROUPS;   // tokens; groups of a block of 128 input features
  static constexpr int kSums = COLUMNS / 2;                    // of a thread
  // Sums of more than 64 tokens need the registers of two warpgroups less.
  static constexpr bool kIsWide = COLUMNS > 64;
  static constexpr int kWarpgroups = kIsWide ? 2 : 4, kWarpgroupsM = WARPGROUPS_M, kWarpgroupsK = kWarpgroups / WARPGROUPS_M;
  static constexpr int kStrips = 4 * WARPGROUPS_M, kConsumers = 128 * kWarpgroups, kThreads = kConsumers + 128;
  // Few tokens take few registers: then a CTA comes up while smaller kernels run beside it, and fills its ring. What a CTA
  // has at its start must do: a warpgroup that asked for more would wait for ever.
  static constexpr bool kIsLean = COLUMNS <= 32;
  static constexpr int kLoaderRegisters = kIsLean ? 48 : kIsWide ? 24 : 32;
  static constexpr int kMultiplierRegisters = kIsLean ? 88 : kIsWide ? 240 : 112;
  static constexpr int kBoundThreads = kIsLean ? 768 : kThreads;   // among which the compiler shares registers out
  static_assert(kLoaderRegisters + kWarpgroups * kMultiplierRegisters <=
                (kWarpgroups + 1) * (65536 / kBoundThreads / 8 * 8));

  static constexpr int kBlocks = kIsWide ? kWarpgroupsK : WARPGROUPS_M == 1 ? 4 : 2;   // of a stage
  static_assert(kBlocks % kWarpgroupsK == 0);
  static constexpr int kTokenBytes = COLUMNS * 128;                       // of a block, swizzled
  static constexpr int kBlockBytes = kStrips * (Codes::kCodeBytes + Codes::kWordBytes);
  static constexpr int kMostTokens = 128, kTotalsBytes = 4 * kMostTokens * GROUPS;   // of a block
  static constexpr int kCodeOffset = kBlocks * kTokenBytes;
  static constexpr int kTotalsOffset = kCodeOffset + kBlocks * kBlockBytes;
  static constexpr int kStageBytes = (kTotalsOffset + kBlocks * kTotalsBytes + 1023) / 1024 * 1024;

  // Scale and bias of a pass's rows, and scales of its tokens; of two passes in turn.
  static constexpr int kRows = 16 * kStrips, kPassBytes = 6 * kRows + 4 * COLUMNS, kConstantBytes = 2 * kPassBytes;
  static constexpr int kRest = 227 * 1024 - 1024 - kConstantBytes;   // 1024: the base is aligned by hand
  static constexpr int kStages = kRest / (kStageBytes + 16) < 16 ? kRest / (kStageBytes + 16) : 16;
  static constexpr int kBarrierOffset = kStages * kStageBytes;
  static constexpr int kConstantOffset = kBarrierOffset + 16 * kStages;
  static constexpr int kTotalBytes = kConstantOffset + kConstantBytes + 1024;
  // Sums that are exchanged lie where the ring was.
  static_assert(kStages >= 2 && kConsumers * kSums * 4 <= kBarrierOffset);
};

template <typename SHAPE>
struct W4a8Memory {
  uint32_t base;

  __device__ __forceinline__ explicit W4a8Memory(uint32_t start) : base((start + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t tokens(int stage) const { return base + stage * SHAPE::kStageBytes; }
  // Of a block: codes of the pass's strips, then their words.
  __device__ __forceinline__ uint32_t codes(int stage, int block, int strip) const {
    return tokens(stage) + SHAPE::kCodeOffset + block * SHAPE::kBlockBytes + strip * SHAPE::Codes::kCodeBytes;
  }
  __device__ __forceinline__ uint32_t words(int stage, int block, int strip) const {
    return codes(stage, block, SHAPE::kStrips) + strip * SHAPE::Codes::kWordBytes;
  }
  __device__ __forceinline__ uint32_t totals(int stage, int block) const {
    return tokens(stage) + SHAPE::kTotalsOffset + block * SHAPE::kTotalsBytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return base + SHAPE::kBarrierOffset + 16 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
  // fp32 scales of rows, 16-bit biases of rows, fp32 scales of tokens.
  __device__ __forceinline__ uint32_t row_scales(int pass) const {
    return base + SHAPE::kConstantOffset + pass % 2 * SHAPE::kPassBytes;
  }
  __device__ __forceinline__ uint32_t biases(int pass) const { return row_scales(pass) + 4 * SHAPE::kRows; }
  __device__ __forceinline__ uint32_t token_scales(int pass) const { return row_scales(pass) + 6 * SHAPE::kRows; }
  // Of lane 0 of a warp's sums of 8 tokens; 16 bytes a lane.
  __device__ __forceinline__ uint32_t exchange(int warp, int group) const {
    return base + (group * (SHAPE::kConsumers / 32) + warp) * 512;
  }
};

// What a CTA multiplies.
template <typename SHAPE>
struct W4a8Share {
  int rank;                     // in the cluster
  int begin_strip, end_strip;   // of the cluster
  int begin_block, end_block;   // of the CTA
  int num_passes;

  __device__ __forceinline__ explicit W4a8Share(const MixedGemmW4a8Params& p) : rank(blockIdx.x % p.splits) {
    const int strips = p.out_features / 16, blocks = p.in_features / 128, cluster = blockIdx.x / p.splits;
    begin_strip = part_of(strips, cluster, p.num_clusters), end_strip = part_of(strips, cluster + 1, p.num_clusters);
    begin_block = part_of(blocks, rank, p.splits), end_block = part_of(blocks, rank + 1, p.splits);
    num_passes = (end_strip - begin_strip + SHAPE::kStrips - 1) / SHAPE::kStrips;
  }

  __device__ __forceinline__ int pass_begin(int pass) const {
    return begin_strip + part_of(end_strip - begin_strip, pass, num_passes);
  }
  __device__ __forceinline__ int num_blocks() const { return end_block - begin_block; }
  __device__ __forceinline__ int num_stages() const { return (num_blocks() + SHAPE::kBlocks - 1) / SHAPE::kBlocks; }
};

}  // namespace slipstream
