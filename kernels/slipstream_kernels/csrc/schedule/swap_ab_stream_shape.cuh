// Sizes of one variant of the streaming swap-AB GEMM, the work of a CTA, and where things lie in shared memory.
//
// A unit is 16 weight rows. A tile is a run of units that a CTA multiplies at once, 64 weight rows each of its two
// warpgroups of consumers. The work is the list of all chunks (128 columns) of all tiles, tile by tile; every CTA has an equal
// run of it, so a run may begin and end inside of tiles. A segment is what a run has of one tile.
#pragma once

#include <cuda_bf16.h>

#include "params/swap_ab_stream_params.h"
#include "ptx/cluster.cuh"
#include "ptx/hopper_copy.cuh"
#include "schedule/stream_runs.cuh"

namespace slipstream {

template <int COLUMNS>
struct StreamShape {
  using Params = SwapAbStreamParams;
  using Out = __nv_bfloat16;
  static constexpr bool kHasTokenScales = true;
  static constexpr int kColumns = COLUMNS, kScaledTokens = COLUMNS;
  static constexpr int kConsumerThreads = 2 * 128, kThreads = 128 + kConsumerThreads;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;   // 40 + 2 * 232 = 3 * 168, those of the launch
  static constexpr int kUnits = 8;   // of a CTA, at most
  static constexpr int kSteps = 4;   // products of 32 columns
  // A row of sums consists of blocks as wide as one instruction.
  static constexpr int kBlockColumns = 128, kHalves = COLUMNS / kBlockColumns;
  static constexpr int kBlockSums = kBlockColumns / 2, kBlockGroups = kBlockColumns / 8, kGroups = COLUMNS / 8;
  // Parts of a split tile, which its CTAs add one after the other.
  static constexpr int kParts = 4, kPartGroups = kGroups / kParts;
  static_assert(kHalves * kBlockColumns == COLUMNS && kParts * kPartGroups == kGroups);
  static constexpr int kSlotFloats = kGroups * kConsumerThreads * 4;

  static constexpr int kUnitBytes = 16 * 128, kTokenBytes = COLUMNS * 128;
  static constexpr int kMaxStages = 16;
  static constexpr int kWordOffset = 2 * 8 * kMaxStages, kScaleOffset = kWordOffset + 16;
  static constexpr int kRingOffset = (kScaleOffset + 4 * COLUMNS + 1023) / 1024 * 1024;
  static constexpr int kTotalBytes = 224 * 1024;
  static constexpr int kRingBytes = kTotalBytes - 1024 - kRingOffset;

  static __host__ __device__ constexpr int stage_bytes(int units) { return units * kUnitBytes + kTokenBytes; }
  // Bytes that products of the units beyond those loaded read beyond the last stage.
  static __host__ __device__ constexpr int overrun_bytes(int units) {
    const int beyond = (kUnits - units) * kUnitBytes - kTokenBytes;
    return beyond > 0 ? beyond : 0;
  }
  static __host__ __device__ constexpr int stages(int units) {
    const int stages = (kRingBytes - overrun_bytes(units)) / stage_bytes(units);
    return stages < kMaxStages ? stages : kMaxStages;
  }
  static_assert(stages(kUnits) >= 2);   // with fewer nothing would overlap
};

struct StreamMaps {
  CUtensorMap weights;   // a box: all units of a tile
  CUtensorMap tokens;
};

// Units that are loaded of each tile: of the largest.
__host__ __device__ __forceinline__ int stream_tile_units(const SwapAbStreamParams& p) {
  return (p.num_units + p.num_tiles - 1) / p.num_tiles;
}

// The work of this CTA.
struct StreamWork {
  StreamRuns runs;
  int begin, end;

  __device__ __forceinline__ explicit StreamWork(const SwapAbStreamParams& p)
      : runs{static_cast<uint32_t>(p.num_tiles), static_cast<uint32_t>((p.in_features + 127) / 128), gridDim.x},
        begin(runs.begin(blockIdx.x)), end(runs.begin(blockIdx.x + 1)) {}

  static __device__ __forceinline__ int begin_unit(const SwapAbStreamParams& p, uint32_t tile) {
    return static_cast<int>(static_cast<uint32_t>(p.num_units) * tile / p.num_tiles);
  }

  static __device__ __forceinline__ StreamTile tile(const SwapAbStreamParams& p, int index) {
    return {begin_unit(p, index), begin_unit(p, index + 1), 0};
  }
};

// Barriers, and who arrives and who waits:
// full: the thread of weights and that of tokens arrive, each announcing its bytes; copies complete them. Consumers wait.
// empty: a lane of each consumer warp arrives; both producer threads wait.
template <typename SHAPE>
struct StreamMemory {
  uint32_t base;
  int token_offset, stage_bytes, num_stages;

  __device__ __forceinline__ StreamMemory(uint32_t start, int units)
      : base((start + 1023) & ~1023u), token_offset(units * SHAPE::kUnitBytes),
        stage_bytes(SHAPE::stage_bytes(units)), num_stages(SHAPE::stages(units)) {}

  __device__ __forceinline__ uint32_t full(int stage) const { return base + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(SHAPE::kMaxStages + stage); }
  __device__ __forceinline__ uint32_t word() const { return base + SHAPE::kWordOffset; }
  __device__ __forceinline__ uint32_t token_scales() const { return base + SHAPE::kScaleOffset; }
  __device__ __forceinline__ uint32_t weights(int stage) const {
    return base + SHAPE::kRingOffset + stage * stage_bytes;
  }
  __device__ __forceinline__ uint32_t tokens(int stage) const { return weights(stage) + token_offset; }

  // By one thread.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < num_stages; ++stage) {
      init_barrier(full(stage), 2);
      init_barrier(empty(stage), SHAPE::kConsumerThreads / 32);
    }
    publish_barriers();
  }
};

}  // namespace slipstream
