// Sizes of one variant of the streaming W4A8 product, and where things lie in shared memory.
//
// A unit is 16 weight rows, a tile four units of each consumer warpgroup times COLUMNS tokens, a chunk 128 summed columns of a
// tile. The work is the list of all chunks of all tiles, tile by tile, of which every CTA has an equal run, as in
// swap_ab_stream_shape.cuh.
#pragma once

#include "params/stream_w4a8_params.h"
#include "ptx/cluster.cuh"
#include "ptx/hopper_copy.cuh"

namespace slipstream {

// T: of the result. GROUPS: of a chunk, with scales of their own. WARPGROUPS: of consumers, 64 weight rows each. IS_EXACT:
// stream_w4a8_multiply.cuh.
template <typename T, int GROUPS, int WARPGROUPS, int COLUMNS, bool IS_EXACT>
struct StreamW4A8Shape {
  using Params = StreamW4A8Params;
  using Out = T;
  static constexpr bool kHasTokenScales = true, kIsExact = IS_EXACT;
  static constexpr int kGroupsOfChunk = GROUPS, kColumns = COLUMNS;
  static constexpr int kWarpgroups = WARPGROUPS, kUnits = 4 * WARPGROUPS;   // of a tile
  static constexpr int kConsumerThreads = WARPGROUPS * 128, kThreads = kConsumerThreads + 128;
  // Together no more than the launch has: 3 * 168 or 4 * 128.
  static constexpr int kConsumerRegisters = WARPGROUPS == 2 ? 232 : 160;
  static constexpr int kProducerRegisters = WARPGROUPS == 2 ? 40 : 32;
  static_assert(WARPGROUPS == 2 || WARPGROUPS == 3);

  // A row of sums consists of blocks as wide as one instruction, whose sums have to fit the registers of the launch.
  static constexpr int kHalves = COLUMNS > 128 ? 2 : 1, kBlockColumns = COLUMNS / kHalves;
  static constexpr int kBlockSums = kBlockColumns / 2, kBlockGroups = kBlockColumns / 8, kGroups = COLUMNS / 8;
  // Parts of a split tile, which its CTAs add one after the other.
  static constexpr int kPartGroups = kGroups % 4 == 0 ? 4 : 2, kParts = kGroups / kPartGroups;
  static_assert(kHalves * kBlockColumns == COLUMNS && kParts * kPartGroups == kGroups);
  // Exact: sums of a group beside those of all; of few tokens there are registers for those of two groups.
  static constexpr bool kHasTwoParts = WARPGROUPS == 2 && COLUMNS <= 96;
  static_assert(!kIsExact || kHalves == 1);
  static constexpr int kSlotFloats = kGroups * kConsumerThreads * 4;

  static constexpr int kMostTokens = 512;   // of all tiles: their scales lie in shared memory
  static constexpr int kScaledTokens = kMostTokens;
  static constexpr int kTokenBytes = COLUMNS * 128, kCodeBytes = kUnits * 1024, kScaleBytes = kUnits * 64 * GROUPS;
  static constexpr int kSumBytes = kIsExact ? 4 * 128 : 0;   // activation sums of 128 tokens and a group
  static constexpr int kStageBytes = (kTokenBytes + kCodeBytes + kScaleBytes + GROUPS * kSumBytes + 1023) / 1024 * 1024;
  static constexpr int kTotalBytes = 227 * 1024;
  static constexpr int kMaxStages = 16;
  static constexpr int kEmptyOffset = 8 * kMaxStages, kWordOffset = 2 * kEmptyOffset, kTokenScaleOffset = kWordOffset + 16;
  static constexpr int kRingOffset = (kTokenScaleOffset + 4 * kMostTokens + 1023) / 1024 * 1024;
  static constexpr int kMostStages = (kTotalBytes - 1024 - kRingOffset) / kStageBytes;   // 1024: aligned by hand
  static constexpr int kStages = kMostStages < kMaxStages ? kMostStages : kMaxStages;
  static_assert(kStages >= 3);
};

struct StreamW4A8Maps {
  CUtensorMap tokens;   // a box: a chunk of all tokens of a tile
};

// Barriers, and who arrives and who waits:
// full: the thread of codes and that of tokens arrive, each announcing its bytes; copies complete them. Consumers wait.
// empty: a lane of each consumer warp arrives; both producer threads wait.
template <typename SHAPE>
struct StreamW4A8Memory {
  uint32_t base;

  __device__ __forceinline__ explicit StreamW4A8Memory(uint32_t start) : base((start + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t full(int stage) const { return base + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return base + SHAPE::kEmptyOffset + 8 * stage; }
  __device__ __forceinline__ uint32_t word() const { return base + SHAPE::kWordOffset; }
  __device__ __forceinline__ uint32_t token_scales() const { return base + SHAPE::kTokenScaleOffset; }
  __device__ __forceinline__ uint32_t tokens(int stage) const {
    return base + SHAPE::kRingOffset + stage * SHAPE::kStageBytes;
  }
  __device__ __forceinline__ uint32_t codes(int stage) const { return tokens(stage) + SHAPE::kTokenBytes; }
  __device__ __forceinline__ uint32_t scales(int stage) const { return codes(stage) + SHAPE::kCodeBytes; }
  __device__ __forceinline__ uint32_t activation_sums(int stage) const { return scales(stage) + SHAPE::kScaleBytes; }

  // By one thread.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < SHAPE::kStages; ++stage) {
      init_barrier(full(stage), 2);
      init_barrier(empty(stage), SHAPE::kConsumerThreads / 32);
    }
    publish_barriers();
  }
};

}  // namespace slipstream
