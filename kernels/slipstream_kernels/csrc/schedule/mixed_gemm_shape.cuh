// Sizes of one variant of the mixed-input GEMM (weights of 4 or 8 bits become register operands), the work of a CTA, and where
// things lie in shared memory.
//
// A cluster owns consecutive tiles of 16 output features. A pass has up to 64 output features for each of WARPGROUPS_M
// warpgroups. The CTAs of the cluster split the input features; inside a CTA, warpgroups beyond WARPGROUPS_M divide the
// blocks of 128, so that narrow outputs need no sums that cross CTAs.
#pragma once

#include "ptx/cluster.cuh"
#include "ptx/cluster_splits.cuh"
#include "formats/mixed_gemm_formats.cuh"
#include "params/mixed_gemm_params.h"
#include "ptx/hopper_copy.cuh"

namespace slipstream {

template <typename FORMAT, int COLUMNS, int WARPGROUPS_M>
struct MixedGemmShape {
  using Format = FORMAT;
  using Operand = typename FORMAT::Operand;
  static constexpr bool kIsScaledInside = FORMAT::kIsScaledInside;
  // Columns of products that two of a pair make are added inside.
  static constexpr bool kIsInPairs = FORMAT::kTokenColumns == 2;
  static_assert(!kIsInPairs || (kIsScaledInside && FORMAT::kTokenColumns * sizeof(Operand) == 2));
  // Rows of e4m3 have scales, and results of a type of their own. Those of the most tokens alone may be several tiles.
  static constexpr bool kIsE4m3 = sizeof(Operand) == 1 && !kIsInPairs;
  static constexpr bool kHasTokenTiles = sizeof(Operand) == 2 || (kIsE4m3 && COLUMNS == 128);
  // Of a tile; of a thread: products' sums, and those of tokens in eights. Four tokens take every second place of eight.
  static constexpr int kColumns = COLUMNS, kTokens = COLUMNS / FORMAT::kTokenColumns, kTokenGroups = (kTokens + 7) / 8;
  static constexpr int kParts = COLUMNS / 2, kSums = 4 * kTokenGroups;
  // Scaling inside keeps the sums of a group beside those of all groups: of more than 64 tokens they need the registers of
  // two warpgroups less.
  static constexpr bool kIsWide = kIsScaledInside && COLUMNS > 64;
  static constexpr int kWarpgroups = kIsWide ? 2 : 4, kWarpgroupsM = WARPGROUPS_M, kWarpgroupsK = kWarpgroups / WARPGROUPS_M;
  static constexpr int kTiles = 4 * WARPGROUPS_M, kConsumers = 128 * kWarpgroups, kThreads = kConsumers + 128;
  static constexpr int kWarps = kConsumers / 32;
  // Few tokens take few registers: then a CTA comes up while smaller kernels run beside it, and fills its ring. What a
  // CTA has at its start must do: a warpgroup that asks for more waits for ever.
  static constexpr bool kIsLean = kIsScaledInside && COLUMNS <= 32;
  static constexpr int kProducerRegisters = kIsLean ? 48 : kIsWide ? 24 : 32;
  static constexpr int kConsumerRegisters = kIsLean ? 88 : kIsWide ? 240 : 112;
  static constexpr int kBoundThreads = kIsLean ? 768 : kThreads;   // among which the compiler divides registers
  static_assert(kProducerRegisters + kWarpgroups * kConsumerRegisters <=
                (kWarpgroups + 1) * (65536 / kBoundThreads / 8 * 8));

  static constexpr bool kIsByRows = FORMAT::kOrder == WeightOrder::kRows;
  // Blocks of a stage.
  static constexpr int kBlocks = kIsWide ? kWarpgroupsK : WARPGROUPS_M == 1 ? 4 : kIsByRows && WARPGROUPS_M == 4 ? 1 : 2;
  static_assert(kBlocks % kWarpgroupsK == 0);
  static constexpr int kSlabs = sizeof(Operand);               // of 128 bytes of a token's block
  static constexpr int kTokenBytes = kSlabs * COLUMNS * 128;   // of a block, swizzled
  static constexpr int kBlockBytes = kTiles * (FORMAT::kTileBytes + FORMAT::kScaleBytes);
  // Activation sums of a block: those of a group follow each other, for e4m3 rows of the most tokens of a tile. In pairs, a
  // token's sum and scale.
  static constexpr int kSumTokens = kIsE4m3 ? 128 : COLUMNS;
  static constexpr int kActivationSumBytes = kIsScaledInside ? 4 * kSumTokens * FORMAT::kGroups : 0;
  static constexpr int kWeightOffset = kBlocks * kTokenBytes;
  static constexpr int kActivationSumOffset = kWeightOffset + kBlocks * kBlockBytes;
  static constexpr int kStageBytes = (kActivationSumOffset + kBlocks * kActivationSumBytes + 1023) / 1024 * 1024;

  // Passes of 4-bit weights beside 16-bit tokens begin at whole warpgroups' tiles, so that few warpgroups multiply less
  // than their 64 rows.
  static constexpr int kPassTiles = FORMAT::kOrder == WeightOrder::kTiles ? 4 : 1;
  // Scale and bias of a pass's rows, and scales of e4m3 tokens; of two passes in turn.
  static constexpr int kRows = 16 * kTiles, kPassBytes = 6 * kRows + (kIsE4m3 ? 4 * COLUMNS : 0);
  static constexpr int kConstantBytes = 2 * kPassBytes;
  static constexpr int kRest = 227 * 1024 - 1024 - kConstantBytes;   // 1024: the base is aligned by hand
  static constexpr int kStages = kRest / (kStageBytes + 16) < 16 ? kRest / (kStageBytes + 16) : 16;
  static constexpr int kBarrierOffset = kStages * kStageBytes;
  static constexpr int kConstantOffset = kBarrierOffset + 16 * kStages;
  static constexpr int kTotalBytes = kConstantOffset + kConstantBytes + 1024;
  // Sums that are exchanged lie where the ring was.
  static constexpr bool kFits = kStages >= 2 && kConsumers * kSums * 4 <= kBarrierOffset;
};

template <typename SHAPE>
struct MixedGemmMemory {
  using Format = typename SHAPE::Format;
  uint32_t base;

  __device__ __forceinline__ explicit MixedGemmMemory(uint32_t start) : base((start + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t tokens(int stage) const { return base + stage * SHAPE::kStageBytes; }
  // A block's tiles, then their packed scale words; by tiles: all blocks of each tile, then the words of each block.
  __device__ __forceinline__ uint32_t weights(int stage, int block, int tile) const {
    const uint32_t start = tokens(stage) + SHAPE::kWeightOffset;
    if constexpr (Format::kOrder == WeightOrder::kTiles) {
      return start + (tile * SHAPE::kBlocks + block) * Format::kTileBytes;
    } else {
      return start + block * SHAPE::kBlockBytes + tile * Format::kTileBytes;
    }
  }
  __device__ __forceinline__ uint32_t scales(int stage, int block, int tile) const {
    if constexpr (Format::kOrder == WeightOrder::kTiles) {
      return weights(stage, 0, SHAPE::kTiles) + (block * SHAPE::kTiles + tile) * Format::kScaleBytes;
    } else {
      return weights(stage, block, SHAPE::kTiles) + tile * Format::kScaleBytes;
    }
  }
  __device__ __forceinline__ uint32_t activation_sums(int stage, int block) const {
    return tokens(stage) + SHAPE::kActivationSumOffset + block * SHAPE::kActivationSumBytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return base + SHAPE::kBarrierOffset + 16 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
  // fp32 scales of rows, 16-bit biases of rows, fp32 scales of tokens.
  __device__ __forceinline__ uint32_t row_scales(int pass) const {
    return base + SHAPE::kConstantOffset + pass % 2 * SHAPE::kPassBytes;
  }
  __device__ __forceinline__ uint32_t biases(int pass) const { return row_scales(pass) + 4 * SHAPE::kRows; }
  __device__ __forceinline__ uint32_t token_scales(int pass) const { return row_scales(pass) + 6 * SHAPE::kRows; }
  // Sums of 8 tokens of a warp's lane 0; 16 bytes a lane.
  __device__ __forceinline__ uint32_t exchange(int warp, int group) const {
    return base + (group * SHAPE::kWarps + warp) * 512;
  }
};

// What a CTA multiplies.
template <typename SHAPE>
struct MixedGemmWork {
  int rank;                     // in the cluster
  int begin_tile, end_tile;     // of output features, of the cluster
  int begin_block, end_block;   // of input features, of the CTA
  int first_token, num_tokens;  // of the cluster
  int num_passes;

  __device__ __forceinline__ explicit MixedGemmWork(const MixedGemmParams& p) : rank(blockIdx.x % p.splits) {
    const int tiles = p.out_features / 16, blocks = p.in_features / 128, cluster = blockIdx.x / p.splits;
    if constexpr (!SHAPE::kHasTokenTiles) {
      begin_tile = split_begin(tiles, cluster, p.num_clusters), end_tile = split_begin(tiles, cluster + 1, p.num_clusters);
      first_token = 0, num_tokens = p.num_tokens;
    } else {
      const int index = cluster / p.token_tiles, count = p.num_clusters / p.token_tiles;
      begin_tile = split_begin(tiles, index, count), end_tile = split_begin(tiles, index + 1, count);
      first_token = cluster % p.token_tiles * SHAPE::kColumns;
      num_tokens = min(SHAPE::kColumns, p.num_tokens - first_token);
    }
    begin_block = split_begin(blocks, rank, p.splits), end_block = split_begin(blocks, rank + 1, p.splits);
    num_passes = (end_tile - begin_tile + SHAPE::kTiles - 1) / SHAPE::kTiles;
  }

  __device__ __forceinline__ int pass_begin(int pass) const {
    constexpr int kUnit = SHAPE::kPassTiles;
    if constexpr (kUnit == 1) return begin_tile + split_begin(end_tile - begin_tile, pass, num_passes);
    const int units = (end_tile - begin_tile + kUnit - 1) / kUnit;
    return min(end_tile, begin_tile + kUnit * split_begin(units, pass, num_passes));
  }
  __device__ __forceinline__ int num_blocks() const { return end_block - begin_block; }
  __device__ __forceinline__ int num_stages() const { return (num_blocks() + SHAPE::kBlocks - 1) / SHAPE::kBlocks; }
};

}  // namespace slipstream
