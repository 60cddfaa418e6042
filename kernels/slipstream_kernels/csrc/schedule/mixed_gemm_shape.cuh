// Sizes of one variant of the product of weights that become register operands, who does what, and where things lie in
// shared memory.
//
// A cluster owns consecutive strips of 16 output features and goes through them in passes of up to 64 for each of
// WARPGROUPS_M warpgroups. Its CTAs have a part of the input features each; inside a CTA the four warpgroups share out
// blocks of 128 where they outnumber the row groups. So narrow outputs need no sums that cross CTAs.
#pragma once

#include "ptx/cluster.cuh"
#include "ptx/cluster_parts.cuh"
#include "formats/mixed_gemm_formats.cuh"
#include "params/mixed_gemm_params.h"
#include "ptx/hopper_copy.cuh"

namespace slipstream {

template <typename FORMAT, int COLUMNS, int WARPGROUPS_M>
struct MixedGemmShape {
  using Format = FORMAT;
  using Operand = typename FORMAT::Operand;
  static constexpr int kColumns = COLUMNS, kSums = COLUMNS / 2;   // tokens of a tile; of a thread
  static constexpr int kWarpgroups = 4, kWarpgroupsM = WARPGROUPS_M, kWarpgroupsK = kWarpgroups / WARPGROUPS_M;
  static constexpr int kStrips = 4 * WARPGROUPS_M, kConsumers = 128 * kWarpgroups, kThreads = kConsumers + 128;
  static constexpr int kWarps = kConsumers / 32;
  // What a CTA has at its start must do: a warpgroup that asks for more waits for ever.
  static constexpr int kLoaderRegisters = 32, kMultiplierRegisters = 112, kEntryRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kLoaderRegisters + kWarpgroups * kMultiplierRegisters <= (kWarpgroups + 1) * kEntryRegisters);

  static constexpr int kSlabs = sizeof(Operand);   // of 128 bytes of a token's block
  static constexpr int kBlocks = WARPGROUPS_M == 1 ? 4 : WARPGROUPS_M == 2 ? 2 : 1;   // of a stage
  static_assert(kBlocks % kWarpgroupsK == 0);
  static constexpr int kTokenBytes = kSlabs * COLUMNS * 128;   // of a block, swizzled
  static constexpr int kBlockBytes = kStrips * FORMAT::kStripBytes;
  static constexpr int kWeightOffset = kBlocks * kTokenBytes;
  static constexpr int kStageBytes = (kWeightOffset + kBlocks * kBlockBytes + 1023) / 1024 * 1024;

  // Scale and bias of a pass's rows, of two passes in turn.
  static constexpr int kRows = 16 * kStrips, kPassBytes = 6 * kRows, kConstantBytes = 2 * kPassBytes;
  static constexpr int kRest = 227 * 1024 - 1024 - kConstantBytes;   // 1024: the base is aligned by hand
  static constexpr int kStages = kRest / (kStageBytes + 16) < 16 ? kRest / (kStageBytes + 16) : 16;
  static constexpr int kBarrierOffset = kStages * kStageBytes;
  static constexpr int kConstantOffset = kBarrierOffset + 16 * kStages;
  static constexpr int kTotalBytes = kConstantOffset + kConstantBytes + 1024;
  // Sums that are exchanged lie where the ring was.
  static constexpr int kExchangeBytes = kConsumers * kSums * 4;
  static constexpr bool kFits = kStages >= 2 && kExchangeBytes <= kBarrierOffset;
};

template <typename SHAPE>
struct MixedGemmMemory {
  uint32_t base;

  __device__ __forceinline__ explicit MixedGemmMemory(uint32_t start) : base((start + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t tokens(int stage) const { return base + stage * SHAPE::kStageBytes; }
  __device__ __forceinline__ uint32_t weights(int stage, int block, int strip) const {
    return tokens(stage) + SHAPE::kWeightOffset + block * SHAPE::kBlockBytes + strip * SHAPE::Format::kStripBytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return base + SHAPE::kBarrierOffset + 16 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
  // fp32 scales of rows, 16-bit biases of rows.
  __device__ __forceinline__ uint32_t row_scales(int pass) const {
    return base + SHAPE::kConstantOffset + pass % 2 * SHAPE::kPassBytes;
  }
  __device__ __forceinline__ uint32_t biases(int pass) const { return row_scales(pass) + 4 * SHAPE::kRows; }
  // Of lane 0 of a warp's sums of 8 tokens; 16 bytes a lane.
  __device__ __forceinline__ uint32_t exchange(int warp, int group) const {
    return base + (group * SHAPE::kWarps + warp) * 512;
  }
};

// What a CTA multiplies.
template <typename SHAPE>
struct MixedGemmShare {
  int rank;                     // in the cluster
  int begin_strip, end_strip;   // of the cluster
  int begin_block, end_block;   // of the CTA
  int first_token, num_tokens;  // of the cluster
  int num_passes;

  __device__ __forceinline__ explicit MixedGemmShare(const MixedGemmParams& p) : rank(blockIdx.x % p.splits) {
    const int strips = p.out_features / 16, blocks = p.in_features / 128, cluster = blockIdx.x / p.splits;
    const int part = cluster / p.token_tiles, parts = p.num_clusters / p.token_tiles;
    begin_strip = part_of(strips, part, parts), end_strip = part_of(strips, part + 1, parts);
    begin_block = part_of(blocks, rank, p.splits), end_block = part_of(blocks, rank + 1, p.splits);
    first_token = cluster % p.token_tiles * SHAPE::kColumns;
    num_tokens = min(SHAPE::kColumns, p.num_tokens - first_token);
    num_passes = (end_strip - begin_strip + SHAPE::kStrips - 1) / SHAPE::kStrips;
  }

  __device__ __forceinline__ int pass_begin(int pass) const {
    return begin_strip + part_of(end_strip - begin_strip, pass, num_passes);
  }
  __device__ __forceinline__ int num_blocks() const { return end_block - begin_block; }
  __device__ __forceinline__ int num_stages() const { return (num_blocks() + SHAPE::kBlocks - 1) / SHAPE::kBlocks; }
};

}  // namespace slipstream
