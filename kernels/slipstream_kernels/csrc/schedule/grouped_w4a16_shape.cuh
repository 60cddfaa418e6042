// Sizes of one variant of the grouped GEMM with 16-bit operands, and where things lie in shared memory.
#pragma once

#include "schedule/grouped_gemm_schedule.cuh"

namespace slipstream {

template <typename INPUT, typename OPERAND, int COLUMNS, int GROUPS, bool IS_GATED>
struct GroupedW4A16Shape {
  using Input = INPUT;      // element of x in memory
  using Operand = OPERAND;  // of the products
  static constexpr int kGroups = GROUPS;
  static constexpr bool kIsGated = IS_GATED;
  static constexpr int kColumns = COLUMNS, kTileRows = 8 * COLUMNS;   // a column: 8 rows of a tile of tokens
  static constexpr int kTiles = 16, kItemTiles = IS_GATED ? 2 : 1, kPassItems = kTiles / kItemTiles;   // of a pass, an item

  // A stage is two blocks of 128 input features: four warps multiply the first, up to four tiles each, four warps the
  // second.
  static constexpr int kBlocks = 2, kRowWarps = 4, kWarpTiles = kTiles / kRowWarps;
  static constexpr int kWarps = kBlocks * kRowWarps;
  // One producer warp, with three idle ones: setmaxnreg moves registers between warpgroups.
  static constexpr int kThreads = 32 * (kWarps + 4);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  static constexpr int kBlockBytes = 1024;                              // of a tile
  static constexpr int kWeightBytes = kTiles * kBlocks * kBlockBytes;   // of a stage
  static constexpr int kScaleBytes = kTiles * kBlocks * 64 * GROUPS;
  static constexpr int kColumnBytes = 8 * 128 * 2;                      // of a block
  static constexpr int kSumBytes = kBlocks * GROUPS * kTileRows * 8;    // activation sums of groups, in front of the rows
  static constexpr int kRowBytes = kSumBytes + kColumns * kBlocks * kColumnBytes;
  static constexpr int kStageBytes = kWeightBytes + kScaleBytes + kRowBytes;
  static constexpr int kRound = 2;   // tiles of a warp whose sums are exchanged together
  static constexpr int kExchangeBytes = kRound * kColumns * kRowWarps * 32 * 16;
  static constexpr int kMaxExperts = 1024;
  static constexpr int kMinItems = 4;   // a shorter pass takes the time of so many
  static constexpr int kScheduleBytes = 4 * kMaxExperts + 16;   // token_tile_ends, and the number of passes
  static constexpr int kStages = (232448 - kExchangeBytes - kScheduleBytes) / (kStageBytes + 16);
  static constexpr int kExchangeOffset = kStages * kStageBytes;
  static constexpr int kScheduleOffset = kExchangeOffset + kExchangeBytes;
  static constexpr int kBarrierOffset = kScheduleOffset + kScheduleBytes;
  static constexpr int kTotalBytes = kBarrierOffset + 16 * kStages;
  static_assert(kTotalBytes <= 232448 && kStages >= 3);
};

// The item of a warp's tile i. Tiles i of the four warps are neighbours, so that a short pass has work for all of them.
template <typename SHAPE>
__device__ __forceinline__ int item_of(int warp, int i) {
  return i / SHAPE::kItemTiles * SHAPE::kRowWarps + warp;
}
// The offset of a tile's weights (or scales) in a stage. bytes: of a tile; full_bytes: of a tile in a full pair of blocks.
template <typename SHAPE>
__device__ __forceinline__ int offset_of(int warp, int i, int bytes, int full_bytes) {
  return i % SHAPE::kItemTiles * SHAPE::kPassItems * full_bytes + item_of<SHAPE>(warp, i) * bytes;
}

}  // namespace slipstream
