// Sizes of one variant of the products of sorted rows with their experts' records, and where things lie in shared memory.
//
// A record is 16 output features (8 rows of gate and the 8 of up) x 128 input features: 4-bit codes as the tensor cores'
// registers want them, and the rows' scales and zero points (slipstream_kernels/expert_records.py). A CTA takes a pass of
// strips of a tile of rows (expert_walk.cuh) over all input features. Its four warpgroups have 64 output features each;
// where a pass is short, all of them have the same ones and share out the blocks of 128 input features.
#pragma once

#include "schedule/expert_walk.cuh"
#include "ptx/hopper_copy.cuh"
#include "ptx/memory_access.cuh"

namespace slipstream {

template <int COLUMNS, int WARPGROUPS_M>
struct RecordShape {
  static constexpr int kColumns = COLUMNS, kSums = COLUMNS / 2;   // rows of a tile; sums of a thread
  static constexpr int kWarpgroups = 4, kWarpgroupsM = WARPGROUPS_M, kWarpgroupsK = kWarpgroups / WARPGROUPS_M;
  static constexpr int kStrips = 4 * WARPGROUPS_M, kConsumers = 128 * kWarpgroups;
  // One more warp loads; it comes with three idle ones, because registers change hands by four warps.
  static constexpr int kThreads = kConsumers + 128, kLoaderRegisters = 32, kMultiplierRegisters = 112;

  // For PassWalk. A pass of few units takes the time of kLeastUnits.
  static constexpr int kTileRows = COLUMNS, kUnit = 1, kPassUnits = kStrips, kMostExperts = 1024;
  static constexpr int kLeastUnits = (COLUMNS <= 16 ? 9 : COLUMNS <= 32 ? 12 : 16) * WARPGROUPS_M / 4;

  static constexpr int kCodeBytes = 1024, kRecordBytes = kCodeBytes + 64, kBlockBytes = kStrips * kRecordBytes;
  static constexpr int kBlocks = WARPGROUPS_M == 1 ? 4 : 2;   // of a stage
  static constexpr int kOwnBlocks = kBlocks / kWarpgroupsK;   // of a stage and warpgroup
  static constexpr int kRowBytes = COLUMNS * 128;             // of a block, swizzled
  static constexpr int kTotalBlocks = 8, kSumBytes = COLUMNS * 32;   // totals of eight blocks, in the last stage of those
  static constexpr int kRecordOffset = kBlocks * kRowBytes, kTotalOffset = kRecordOffset + kBlocks * kBlockBytes;
  static constexpr int kStageBytes = (kTotalOffset + kSumBytes + 1023) / 1024 * 1024;

  // Behind the ring: scales of each warp's output features and of the tile's rows, of two passes in turn (each warp has
  // its own, so that none waits for another); the walk's plan; sums that warpgroups exchange, while the ring is filled
  // for the next pass.
  static constexpr int kWarpBytes = 4 * (16 + COLUMNS), kPassBytes = kConsumers / 32 * kWarpBytes;
  static constexpr int kPlanBytes = 4 * kMostExperts + 16;
  static constexpr int kExchangeBytes = kWarpgroupsK == 1 ? 0 : kConsumers * kSums * 4;
  static constexpr int kRest = 227 * 1024 - 1024 - 2 * kPassBytes - kPlanBytes - kExchangeBytes;   // the base is aligned by hand
  static constexpr int kStages = kRest / (kStageBytes + 16) < 16 ? kRest / (kStageBytes + 16) : 16;
  static constexpr int kBarrierOffset = kStages * kStageBytes, kScaleOffset = kBarrierOffset + 16 * kStages;
  static constexpr int kPlanOffset = kScaleOffset + 2 * kPassBytes, kExchangeOffset = kPlanOffset + kPlanBytes;
  static constexpr int kTotalBytes = kExchangeOffset + kExchangeBytes + 1024;
  static_assert(kStages >= 3 && kOwnBlocks <= 2 && kTotalBlocks % kBlocks == 0);
};

template <typename SHAPE>
struct RecordMemory {
  uint32_t base;

  __device__ __forceinline__ explicit RecordMemory(uint32_t start) : base((start + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t rows(int stage) const { return base + stage * SHAPE::kStageBytes; }
  __device__ __forceinline__ uint32_t records(int stage) const { return rows(stage) + SHAPE::kRecordOffset; }
  __device__ __forceinline__ uint32_t totals(int stage) const { return rows(stage) + SHAPE::kTotalOffset; }
  __device__ __forceinline__ uint32_t full(int stage) const { return base + SHAPE::kBarrierOffset + 16 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
  __device__ __forceinline__ uint32_t feature_scales(int pass, int warp) const {
    return base + SHAPE::kScaleOffset + pass % 2 * SHAPE::kPassBytes + warp * SHAPE::kWarpBytes;
  }
  __device__ __forceinline__ uint32_t row_scales(int pass, int warp) const { return feature_scales(pass, warp) + 64; }
  // Address of lane 0's sums of eight rows; a lane has 16 bytes.
  __device__ __forceinline__ uint32_t exchange(int warp, int column) const {
    return base + SHAPE::kExchangeOffset + (column * (SHAPE::kConsumers / 32) + warp) * 512;
  }
};

// What the gathering kernel writes: each tile's blocks of rows of 128 bytes, swizzled as tensor copies would; behind all
// tiles the activation sums of eight blocks each: rounded to fp16 for all rows, then the rest that rounding leaves.
template <typename SHAPE>
struct GatheredTiles {
  char* base;
  int blocks;
  int64_t tiles;

  __device__ __forceinline__ explicit GatheredTiles(const ExpertParams& p)
      : base(static_cast<char*>(p.arranged)), blocks(p.in_features / 128), tiles(p.most_tiles) {}

  __device__ __forceinline__ char* rows(int64_t tile, int block) const {
    return base + (tile * blocks + block) * SHAPE::kRowBytes;
  }
  __device__ __forceinline__ char* totals(int64_t tile, int block) const {
    constexpr int kTogether = SHAPE::kTotalBlocks;
    return rows(tiles, 0) + (tile * ((blocks + kTogether - 1) / kTogether) + block / kTogether) * SHAPE::kSumBytes;
  }
};

}  // namespace slipstream
