// Sizes of one variant of the grouped GEMM with e4m3 operands, and where things lie in shared memory.
//
// A tile has 16 output features (8 rows of gate and the same 8 of up). Its block of 128 input features holds 4-bit weights
// in the order of the tensor cores' registers, then the rows' scales and zero points (grouped_w4a8_layout.py). A CTA
// multiplies a pass of tiles by a tile of tokens (grouped_gemm_schedule.cuh) over all input features. Each of its four
// warpgroups has 64 output features; in a short pass they have the same ones and divide the blocks among them.
#pragma once

#include "schedule/grouped_gemm_schedule.cuh"
#include "ptx/hopper_copy.cuh"
#include "ptx/memory_access.cuh"

namespace slipstream {

template <int COLUMNS, int WARPGROUPS_M>
struct GroupedW4A8Shape {
  static constexpr int kColumns = COLUMNS, kSums = COLUMNS / 2;   // rows of a tile of tokens; sums of a thread
  static constexpr int kWarpgroups = 4, kWarpgroupsM = WARPGROUPS_M, kWarpgroupsK = kWarpgroups / WARPGROUPS_M;
  static constexpr int kTiles = 4 * WARPGROUPS_M, kConsumers = 128 * kWarpgroups;
  // One producer warp, with three idle ones: setmaxnreg moves registers between warpgroups.
  static constexpr int kThreads = kConsumers + 128, kProducerRegisters = 32, kConsumerRegisters = 112;

  // For PassWalk. A pass of fewer items takes the time of kMinItems.
  static constexpr int kTileRows = COLUMNS, kItemTiles = 1, kPassItems = kTiles, kMaxExperts = 1024;
  static constexpr int kMinItems = (COLUMNS <= 16 ? 9 : COLUMNS <= 32 ? 12 : 16) * WARPGROUPS_M / 4;

  static constexpr int kWeightBytes = 1024, kTileBytes = kWeightBytes + 64, kBlockBytes = kTiles * kTileBytes;
  static constexpr int kBlocks = WARPGROUPS_M == 1 ? 4 : 2;   // of a stage
  static constexpr int kOwnBlocks = kBlocks / kWarpgroupsK;   // of a stage and warpgroup
  static constexpr int kRowBytes = COLUMNS * 128;             // of a block, swizzled
  static constexpr int kSumBlocks = 8, kSumBytes = COLUMNS * 32;   // activation sums of 8 blocks, in the last stage of these
  static constexpr int kWeightOffset = kBlocks * kRowBytes, kActivationSumOffset = kWeightOffset + kBlocks * kBlockBytes;
  static constexpr int kStageBytes = (kActivationSumOffset + kSumBytes + 1023) / 1024 * 1024;

  // Behind the ring: scales of each warp's output features and of the rows, double-buffered by pass (each warp has a copy, so
  // that no warp waits for another); the schedule; the sums that warpgroups exchange while the ring fills for the next pass.
  static constexpr int kWarpBytes = 4 * (16 + COLUMNS), kPassBytes = kConsumers / 32 * kWarpBytes;
  static constexpr int kScheduleBytes = 4 * kMaxExperts + 16;
  static constexpr int kExchangeBytes = kWarpgroupsK == 1 ? 0 : kConsumers * kSums * 4;
  // 1024: the base is aligned by hand.
  static constexpr int kRest = 227 * 1024 - 1024 - 2 * kPassBytes - kScheduleBytes - kExchangeBytes;
  static constexpr int kStages = kRest / (kStageBytes + 16) < 16 ? kRest / (kStageBytes + 16) : 16;
  static constexpr int kBarrierOffset = kStages * kStageBytes, kScaleOffset = kBarrierOffset + 16 * kStages;
  static constexpr int kScheduleOffset = kScaleOffset + 2 * kPassBytes, kExchangeOffset = kScheduleOffset + kScheduleBytes;
  static constexpr int kTotalBytes = kExchangeOffset + kExchangeBytes + 1024;
  static_assert(kStages >= 3 && kOwnBlocks <= 2 && kSumBlocks % kBlocks == 0);
};

template <typename SHAPE>
struct GroupedW4A8Memory {
  uint32_t base;

  __device__ __forceinline__ explicit GroupedW4A8Memory(uint32_t start) : base((start + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t rows(int stage) const { return base + stage * SHAPE::kStageBytes; }
  __device__ __forceinline__ uint32_t weights(int stage) const { return rows(stage) + SHAPE::kWeightOffset; }
  __device__ __forceinline__ uint32_t activation_sums(int stage) const {
    return rows(stage) + SHAPE::kActivationSumOffset;
  }
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

// What permute_rows_kernel writes: for each tile of tokens and block, rows of 128 bytes, swizzled as tensor copies do; behind
// all tiles, activation sums of eight blocks each: rounded to fp16 for all rows, then the rest that rounding leaves.
template <typename SHAPE>
struct PermutedX {
  char* base;
  int blocks;
  int64_t token_tiles;

  __device__ __forceinline__ explicit PermutedX(const GroupedGemmParams& p)
      : base(static_cast<char*>(p.permuted_x)), blocks(p.in_features / 128), token_tiles(p.max_token_tiles) {}

  __device__ __forceinline__ char* rows(int64_t token_tile, int block) const {
    return base + (token_tile * blocks + block) * SHAPE::kRowBytes;
  }
  __device__ __forceinline__ char* activation_sums(int64_t token_tile, int block) const {
    constexpr int kSumBlocks = SHAPE::kSumBlocks;
    return rows(token_tiles, 0) + (token_tile * ((blocks + kSumBlocks - 1) / kSumBlocks) + block / kSumBlocks) * SHAPE::kSumBytes;
  }
};

}  // namespace slipstream
