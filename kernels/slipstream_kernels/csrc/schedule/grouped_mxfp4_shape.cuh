// Sizes of one variant of the grouped GEMM with MXFP4 weights, and where things lie in shared memory.
#pragma once

#include "schedule/token_tiles.cuh"

namespace slipstream {

// 32 output features by 64 input features, and their scales, as they lie in memory (grouped_mxfp4_layout.py).
struct GroupedMxfp4Unit {
  static constexpr int kFeatures = 32, kInputs = 64;
  static constexpr int kScaleOffset = 1024, kBytes = kScaleOffset + 64;

  static __host__ __device__ int count(int in_features) { return (in_features + kInputs - 1) / kInputs; }
};

// A CTA: a tile of tokens of an expert by 32 output features for each warp of a team. Its teams divide the input features.
template <int COLUMNS, int TEAM_WARPS, int TEAMS>
struct GroupedMxfp4Shape {
  static constexpr int kColumns = COLUMNS, kTileRows = 8 * COLUMNS;   // a column: 8 rows of a tile of tokens
  static constexpr int kTeamWarps = TEAM_WARPS, kTeamThreads = 32 * TEAM_WARPS, kTeams = TEAMS;
  static constexpr int kWarps = TEAMS * TEAM_WARPS, kThreads = 32 * kWarps;
  // Of an SM, for which registers are left; shared memory may hold fewer: kTotalBytes and 1 KB each of 228 KB.
  static constexpr int kCtas = (COLUMNS == 1 ? 32 : 20) / kWarps;

  using Unit = GroupedMxfp4Unit;
  static constexpr int kTiles = Unit::kFeatures / 16, kFeatures = Unit::kFeatures * TEAM_WARPS;

  // Every warp has a ring of its own for its units.
  static constexpr int kStageUnits = TEAMS == 1 ? 4 : 2, kStages = 2, kStageBytes = kStageUnits * Unit::kBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  // A team shares rows of x: of each row the input features of some units.
  static constexpr int kRowUnits = TEAM_WARPS == 1 ? 2 : 4, kRowStages = 2;
  static constexpr int kRowBytes = 2 * Unit::kInputs * kRowUnits, kRowStageBytes = kTileRows * kRowBytes;
  static constexpr int kTeamRowBytes = kRowStages * kRowStageBytes;

  static constexpr int kSumStride = kFeatures + 2;                          // of a row of sums in shared memory
  static constexpr int kSumBytes = 4 * TEAMS * kTileRows * kSumStride;      // where weights and rows have been
  static constexpr int kRowsOffset = (kWarps * kRingBytes + 127) / 128 * 128;
  static constexpr int kStreamBytes = kRowsOffset + TEAMS * kTeamRowBytes;
  static constexpr int kPointerOffset = kStreamBytes > kSumBytes ? kStreamBytes : (kSumBytes + 7) / 8 * 8;
  static constexpr int kBarrierOffset = kPointerOffset + 8 * kTileRows;
  static constexpr int kTotalBytes = kBarrierOffset + 8 * kWarps * kStages;
  static_assert(kRowUnits % kStageUnits == 0 && kTileRows * kRowBytes % (16 * kTeamThreads) == 0);
};

}  // namespace slipstream
