// Sizes of one variant of the streaming product, and the walk over a CTA's weights that its producer and its consumers
// make in step.
//
// A CTA owns consecutive units of the output (weight rows, or pairs of gate and up rows), as even a share as can be, so
// that all SMs stream the same number of bytes and no sum crosses CTAs. It goes through them in passes of kTiles tiles of
// 16 rows; a pass goes through the columns in chunks of kChunkBytes; each half (8 rows) of a (chunk, tile) is one slot
// of the ring.
#pragma once

#include "stream_params.h"

#ifndef TUNE_PRODUCERS
#define TUNE_PRODUCERS 2
#endif
#ifndef TUNE_SPANS
#define TUNE_SPANS 4
#endif
#ifndef TUNE_LIMIT
#define TUNE_LIMIT 204800
#endif
#ifndef TUNE_WARPS
#define TUNE_WARPS 8
#endif
#ifndef TUNE_CTAS
#define TUNE_CTAS 1
#endif

namespace slipstream {

template <typename FORMAT, int TILES, int COLUMNS, bool IS_GATED>
struct StreamShape {
  using Format = FORMAT;
  using Operand = typename FORMAT::Operand;
  static constexpr int kTiles = TILES;              // 16-row tiles of a pass: share one read of the activations
  static constexpr int kColumns = COLUMNS;          // 8-token columns
  static constexpr bool kIsGated = IS_GATED;
  static constexpr int kUnitsPerTile = IS_GATED ? 8 : 16;
  static constexpr int kUnitsPerPass = TILES * kUnitsPerTile;

  static constexpr int kWarps = TUNE_WARPS;                  // consumers, each with its own columns of every chunk
  static constexpr int kProducers = TUNE_PRODUCERS;  // each brings every second slot
  static constexpr int kThreads = 32 * (kWarps + kProducers);
  static constexpr int kSpanBytes = 64;
  // Of one warp in a chunk. A bulk copy takes about 28 ns of an SM's copy engine whatever its size: rows of 1 KB keep
  // up with memory only just. More spans need more registers for activations.
  static constexpr int kSpans = FORMAT::kElements * COLUMNS <= 16 ? TUNE_SPANS : 2;
  static constexpr int kGroup = FORMAT::kGroupSpans;  // of them multiplied at once, under one scale if there are any
  static constexpr int kChunkBytes = kWarps * kSpans * kSpanBytes;
  static constexpr int kSpanElements = 4 * FORMAT::kElements;
  static constexpr int kSliceElements = kSpans * kSpanElements;
  static constexpr int kChunkElements = kWarps * kSliceElements;
  // 64 bytes of padding put the two rows that a quarter of a warp reads at once into different banks.
  static constexpr int kRowPitch = kChunkBytes + 64;
  static constexpr int kSlotBytes = 8 * kRowPitch;    // half a tile

  // With few columns, two sums for even and odd steps halve the chain of dependent products.
  static constexpr int kChains = COLUMNS <= 2 || FORMAT::kIsScaledInside ? 2 : 1;

  static constexpr int kFragments = TILES * COLUMNS;
  static constexpr int kRound = kFragments < 2 ? kFragments : 2;   // fragments summed over the warps at once
  static constexpr int kSumBytes = kWarps * kRound * 32 * 16;
  // Two CTAs share an SM: the next kernel's ring fills while this one ends.
  static constexpr int kMaxBytes = TUNE_LIMIT;
  static constexpr int kSlots = (kMaxBytes - kSumBytes) / (kSlotBytes + 16);
  static constexpr int kSumOffset = kSlots * kSlotBytes;
  static constexpr int kBarrierOffset = kSumOffset + kSumBytes;
  static constexpr int kTotalBytes = kBarrierOffset + 2 * kSlots * 8;
};

// The units of one CTA and of one pass.
struct UnitRange {
  int begin, end;

  __device__ __forceinline__ int size() const { return end - begin; }
};

__device__ __forceinline__ UnitRange units_of_cta(const StreamParams& p) {
  const int64_t units = p.num_units;
  const int cta = blockIdx.x;
  return {static_cast<int>(units * cta / p.num_ctas), static_cast<int>(units * (cta + 1) / p.num_ctas)};
}

template <typename SHAPE>
__device__ __forceinline__ int tiles_of_pass(const UnitRange& pass) {
  return min(SHAPE::kTiles, (pass.size() + SHAPE::kUnitsPerTile - 1) / SHAPE::kUnitsPerTile);
}

template <typename SHAPE>
__device__ __forceinline__ int num_chunks(const StreamParams& p) {
  return (p.in_features + SHAPE::kChunkElements - 1) / SHAPE::kChunkElements;
}

// The unit of row 0..7 of a half tile, and its row of the weight. Gated: the first half has gate rows, the second up rows.
template <typename SHAPE>
__device__ __forceinline__ int unit_of(const UnitRange& pass, int tile, int half, int row) {
  return pass.begin + tile * SHAPE::kUnitsPerTile + (SHAPE::kIsGated ? row : 8 * half + row);
}

template <typename SHAPE>
__device__ __forceinline__ int weight_row(const StreamParams& p, int unit, int half) {
  return SHAPE::kIsGated ? unit + half * p.num_units : unit;
}

}  // namespace slipstream
