// Sizes of one variant of the streaming W4A16 product, and where things lie in shared memory.
//
// A unit is 16 weight rows, a tile up to eight units times COLUMNS tokens, a chunk 128 summed columns of a tile, a slab half
// of them: a row of 128 bytes of 16-bit operands. The work is the list of all chunks of all tiles, tile by tile, of which
// every CTA has an equal run, as in swap_ab_stream_shape.cuh.
#pragma once

#include "params/stream_w4a16_params.h"
#include "ptx/cluster.cuh"
#include "ptx/hopper_copy.cuh"

namespace slipstream {

// T: of x and of the result. GROUPS: of a chunk, with scales of their own.
template <typename T, int GROUPS, int COLUMNS>
struct StreamW4A16Shape {
  using Params = StreamW4A16Params;
  using Out = T;
  static constexpr bool kHasTokenScales = false;
  static constexpr int kGroupsOfChunk = GROUPS, kColumns = COLUMNS;
  static constexpr int kUnits = 8, kSlabs = 2;   // of a tile, of a chunk
  // Warpgroups: two multiply, one for each slab of a chunk expands, one copies.
  static constexpr int kConsumerThreads = 2 * 128, kExpandThreads = kSlabs * 128;
  static constexpr int kThreads = kConsumerThreads + kExpandThreads + 128;
  // Together no more than the launch has: five times 96.
  static constexpr int kConsumerRegisters = 176, kExpandRegisters = 48, kProducerRegisters = 24;
  static_assert(2 * kConsumerRegisters + kSlabs * kExpandRegisters + kProducerRegisters <= 5 * 96);

  static constexpr int kSteps = 4;               // products of 16 columns of a slab
  // A row of sums consists of blocks as wide as one instruction, whose sums have to fit the registers of the launch.
  static constexpr int kHalves = COLUMNS > 128 ? 2 : 1, kBlockColumns = COLUMNS / kHalves;
  static constexpr int kBlockSums = kBlockColumns / 2, kBlockGroups = kBlockColumns / 8, kGroups = COLUMNS / 8;
  // Parts of a split tile, which its CTAs add one after the other.
  static constexpr int kPartGroups = 4, kParts = kGroups / kPartGroups;
  static_assert(kHalves * kBlockColumns == COLUMNS && kParts * kPartGroups == kGroups);
  static constexpr int kSlotFloats = kGroups * kConsumerThreads * 4;

  static constexpr int kTokenBytes = COLUMNS * 128, kWeightBytes = kUnits * 16 * 128;   // of a slab
  static constexpr int kStageBytes = kTokenBytes + kWeightBytes;
  static constexpr int kStages = 192 * 1024 / kStageBytes;
  static constexpr int kCodeBytes = kUnits * 1024, kScaleBytes = kUnits * 64 * GROUPS;   // of a chunk
  static constexpr int kCodeStageBytes = kCodeBytes + kScaleBytes;
  static constexpr int kTotalBytes = 227 * 1024;
  static constexpr int kRingOffset = 1024, kCodeOffset = kRingOffset + kStages * kStageBytes;
  static constexpr int kMostCodeStages = (kTotalBytes - 1024 - kCodeOffset) / kCodeStageBytes;   // 1024: aligned by hand
  static constexpr int kCodeStages = kMostCodeStages < 8 ? kMostCodeStages : 8;
  static_assert(kCodeStages >= 2);
  static constexpr int kEmptyOffset = 8 * kStages, kCodeFullOffset = 2 * kEmptyOffset;
  static constexpr int kCodeEmptyOffset = kCodeFullOffset + 8 * kCodeStages;
  static constexpr int kWordOffset = kCodeEmptyOffset + 8 * kCodeStages;
};

struct StreamW4A16Maps {
  CUtensorMap tokens;   // a box: a slab of all tokens of a tile
  CUtensorMap codes;    // a box: a chunk of eight units
};

// Barriers, and who arrives and who waits:
// full: the thread of tokens, announcing its bytes, and a lane of each warp that expands the slab arrive. Consumers wait.
// empty: a lane of each consumer warp arrives; the thread of tokens and warps that expand wait.
// code_full: the thread of codes arrives, announcing bytes; warps that expand wait. code_empty: the reverse.
template <typename SHAPE>
struct StreamW4A16Memory {
  uint32_t base;

  __device__ __forceinline__ explicit StreamW4A16Memory(uint32_t start) : base((start + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t full(int stage) const { return base + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return base + SHAPE::kEmptyOffset + 8 * stage; }
  __device__ __forceinline__ uint32_t code_full(int stage) const { return base + SHAPE::kCodeFullOffset + 8 * stage; }
  __device__ __forceinline__ uint32_t code_empty(int stage) const { return base + SHAPE::kCodeEmptyOffset + 8 * stage; }
  __device__ __forceinline__ uint32_t word() const { return base + SHAPE::kWordOffset; }
  __device__ __forceinline__ uint32_t tokens(int stage) const {
    return base + SHAPE::kRingOffset + stage * SHAPE::kStageBytes;
  }
  __device__ __forceinline__ uint32_t weights(int stage) const { return tokens(stage) + SHAPE::kTokenBytes; }
  __device__ __forceinline__ uint32_t codes(int stage) const {
    return base + SHAPE::kCodeOffset + stage * SHAPE::kCodeStageBytes;
  }
  __device__ __forceinline__ uint32_t scales(int stage) const { return codes(stage) + SHAPE::kCodeBytes; }

  // By one thread.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < SHAPE::kStages; ++stage) {
      init_barrier(full(stage), 1 + 4);
      init_barrier(empty(stage), SHAPE::kConsumerThreads / 32);
    }
    for (int stage = 0; stage < SHAPE::kCodeStages; ++stage) {
      init_barrier(code_full(stage), 1);
      init_barrier(code_empty(stage), SHAPE::kExpandThreads / 32);
    }
    publish_barriers();
  }
};

}  // namespace slipstream
