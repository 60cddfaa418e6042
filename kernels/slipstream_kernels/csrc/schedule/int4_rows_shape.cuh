// Sizes of one variant of the product of 4-bit weights with at most 16 tokens, and the walk over a CTA's weights.
//
// A CTA owns consecutive strips of 16 output features: no sum crosses CTAs. Gated, strips of gate and up take turns, so
// that a CTA has both of a pair. It goes through them in passes of kTiles strips; a pass goes through the input
// features in chunks of 8 blocks of 128, one for each of the 8 multiplying warps; each (chunk, strip) is one slot of
// the ring. The warps' sums are added at the end of a pass.
#pragma once

#include "params/int4_rows_params.h"
#include "schedule/unit_range.cuh"

namespace slipstream {

template <typename OPERAND, int TILES, int COLUMNS, int GROUPS, bool IS_GATED>
struct RowsShape {
  using Operand = OPERAND;   // element of x
  static constexpr int kTiles = TILES, kColumns = COLUMNS, kGroups = GROUPS;   // strips of a pass; tokens / 8; groups of a block
  static constexpr bool kIsGated = IS_GATED;
  static constexpr int kUnit = IS_GATED ? 2 : 1;   // strips that one CTA must have together
  static_assert(TILES % kUnit == 0);

  static constexpr int kWarps = 8;   // that multiply; one more fills the ring
  static constexpr int kThreads = 32 * (kWarps + 1);
  static constexpr int kCtasPerSm = COLUMNS == 1 ? 2 : 1;   // as registers allow
  static constexpr int kBlockBytes = 1024;            // of a strip
  static constexpr int kWordBytes = 16 * 4 * GROUPS;  // of a strip's block
  static constexpr int kWordOffset = kWarps * kBlockBytes;
  static constexpr int kSlotBytes = kWarps * (kBlockBytes + kWordBytes);

  static constexpr int kFragments = TILES * COLUMNS;
  static constexpr int kRound = kFragments < 4 ? kFragments : 4;   // fragments summed over the warps at once
  static constexpr int kSumBytes = kWarps * kRound * 32 * 16;
  // Two CTAs share an SM: of one launch, their latencies overlap; of two, the next one's ring fills while this one
  // ends.
  static constexpr int kSlots = (113664 - kSumBytes) / (kSlotBytes + 16);
  static constexpr int kSumOffset = kSlots * kSlotBytes;
  static constexpr int kBarrierOffset = kSumOffset + kSumBytes;
  static constexpr int kTotalBytes = kBarrierOffset + 16 * kSlots;
  static_assert(kTotalBytes <= 113664 && kSumOffset % 16 == 0);
};

// An SM's even share of the strips; two CTAs that run on it at once divide it: c and c + num_ctas / 2.
template <typename SHAPE>
__device__ __forceinline__ UnitRange strips_of_cta(const Int4RowsParams& p) {
  const int64_t units = p.out_features / (16 * SHAPE::kUnit);
  const int num_sms = p.num_ctas / p.ctas_per_sm, sm = blockIdx.x % num_sms;
  int begin = static_cast<int>(units * sm / num_sms), end = static_cast<int>(units * (sm + 1) / num_sms);
  if (p.ctas_per_sm == 2) {
    const int middle = begin + (end - begin + 1) / 2;
    static_cast<int>(blockIdx.x) < num_sms ? end = middle : begin = middle;
  }
  return {begin * SHAPE::kUnit, end * SHAPE::kUnit};
}

// Where the strip of that turn lies in the weight.
template <typename SHAPE>
__device__ __forceinline__ int strip_of_turn(const Int4RowsParams& p, int turn) {
  return SHAPE::kIsGated ? turn / 2 + turn % 2 * (p.out_features / 32) : turn;
}

__device__ __forceinline__ int num_blocks(const Int4RowsParams& p) { return p.in_features / 128; }

template <typename SHAPE>
__device__ __forceinline__ int num_chunks(const Int4RowsParams& p) {
  return (num_blocks(p) + SHAPE::kWarps - 1) / SHAPE::kWarps;
}

}  // namespace slipstream
