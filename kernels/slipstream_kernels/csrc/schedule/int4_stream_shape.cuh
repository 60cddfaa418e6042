// Sizes of one variant of the streaming product of 4-bit weights, and the walk over a CTA's share of the weights that
// all its roles make in step.
//
// The weights are tiles of 128 output features, each a row of blocks of 128 input features. The blocks of all tiles,
// one tile after the other, are dealt out to the CTAs in runs of equal length: every SM streams the same bytes. A tile
// that several CTAs share has its sums added by the one that comes last, in the order of the CTAs.
#pragma once

#include "params/int4_stream_params.h"

namespace slipstream {

template <typename OPERAND, int COLUMNS, int GROUPS>
struct Int4Shape {
  using Operand = OPERAND;   // element of x
  static constexpr int kColumns = COLUMNS, kGroups = GROUPS;
  static constexpr int kRows = 128, kDepth = 128;
  static constexpr int kSums = COLUMNS / 2;   // of a thread

  // A stage is two blocks along the input features: two warpgroups multiply the first, 64 rows each, two the second.
  static constexpr int kBlocks = 2;
  static constexpr int kConsumerWarps = 16;
  static constexpr int kConsumers = 32 * kConsumerWarps, kWriters = kConsumers / 2;
  static constexpr int kThreads = kConsumers + 32;

  static constexpr int kStrips = kRows / 16;
  static constexpr int kBlockBytes = 16 * kDepth / 2;   // of a strip
  static constexpr int kCodeBytes = kStrips * kBlocks * kBlockBytes;
  static constexpr int kWordBytes = kRows * 4 * GROUPS;   // of a block
  static constexpr int kActivationBytes = COLUMNS * kDepth * 2;   // of a block
  static constexpr int kStageBytes = kCodeBytes + kBlocks * (kWordBytes + kActivationBytes);
  static constexpr int kSumBytes = kWriters * kSums * 4;
  static constexpr int kStages = (226 * 1024 - kSumBytes) / (kStageBytes + 16);
  static constexpr int kSumOffset = kStages * kStageBytes;
  static constexpr int kBarrierOffset = kSumOffset + kSumBytes;
  static constexpr int kTotalBytes = kBarrierOffset + 16 * kStages + 16;
  static_assert(kTotalBytes <= 232448 && kStages >= 3);
};

// A run of one tile's blocks that one CTA takes.
struct Segment {
  int tile, begin, end;   // blocks of the tile

  __device__ __forceinline__ bool is_whole(int blocks) const { return begin == 0 && end == blocks; }
};

// A CTA's run of blocks, cut at the borders of tiles.
struct Share {
  int blocks;      // of a tile
  int64_t next, end;

  __device__ __forceinline__ Share(const Int4StreamParams& p, int cta)
      : blocks(p.in_features / 128), next(first_block(p, cta)), end(first_block(p, cta + 1)) {}

  static __device__ __forceinline__ int num_tiles(const Int4StreamParams& p) { return (p.out_features + 127) / 128; }

  static __device__ __forceinline__ int64_t first_block(const Int4StreamParams& p, int cta) {
    return int64_t{num_tiles(p)} * (p.in_features / 128) * cta / p.num_ctas;
  }

  // The CTA whose run holds a block.
  static __device__ __forceinline__ int cta_of(const Int4StreamParams& p, int64_t block) {
    const int64_t all = int64_t{num_tiles(p)} * (p.in_features / 128);
    return static_cast<int>(((block + 1) * p.num_ctas - 1) / all);
  }

  __device__ __forceinline__ bool is_done() const { return next >= end; }

  __device__ __forceinline__ Segment take() {
    const int tile = static_cast<int>(next / blocks), begin = static_cast<int>(next - int64_t{tile} * blocks);
    const int64_t stop = min(end, int64_t{tile + 1} * blocks);
    next = stop;
    return {tile, begin, static_cast<int>(stop - int64_t{tile} * blocks)};
  }
};

}  // namespace slipstream
