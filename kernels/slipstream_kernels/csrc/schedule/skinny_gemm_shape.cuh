// Sizes of one variant of the streaming product.
//
// A CTA makes passes of kTiles tiles of 16 rows: of consecutive units of the output (weight rows, or pairs of gate and
// up rows), so that no sum crosses CTAs. They are of its share of all units, as even as can be to one row, or of a
// queue, where there are many: memory serves SMs unevenly, by up to a third. A pass goes through the columns in chunks
// of kChunkBytes; each half (8 rows) of a (chunk, tile) is one slot of the ring.
#pragma once

#include "params/skinny_gemm_params.h"

namespace slipstream {

template <typename FORMAT, int TILES, int COLUMNS, bool IS_GATED, bool IS_HELD>
struct SkinnyGemmShape {
  using Format = FORMAT;
  using Operand = typename FORMAT::Operand;
  static constexpr int kTiles = TILES;              // 16-row tiles of a pass: share one read of the activations
  static constexpr int kColumns = COLUMNS;          // 8-token columns
  static constexpr bool kIsGated = IS_GATED;
  static constexpr bool kIsHeld = IS_HELD;          // activations are read once, not once per pass
  static constexpr int kUnitsPerTile = IS_GATED ? 8 : 16;
  static constexpr int kUnitsPerPass = TILES * kUnitsPerTile;

  static constexpr int kWarps = 8;                  // consumers, each with its own columns of every chunk
  static constexpr int kProducers = 2;              // each brings every second slot
  static constexpr int kThreads = 32 * (kWarps + kProducers);
  static constexpr int kSpanBytes = 64;
  // Spans of one warp in a chunk. A bulk copy takes about 28 ns of an SM's copy engine whatever its size: rows of 1 KB keep
  // up with memory only just. More spans need more registers for activations.
  static constexpr int kSpans = FORMAT::kElements * COLUMNS <= 16 ? 4 : 2;
  static constexpr int kGroup = FORMAT::kGroupSpans;  // of them multiplied at once, under one scale if there are any
  static constexpr int kChunkBytes = kWarps * kSpans * kSpanBytes;
  static constexpr int kSpanElements = 4 * FORMAT::kElements;
  static constexpr int kSliceElements = kSpans * kSpanElements;
  static constexpr int kChunkElements = kWarps * kSliceElements;
  static constexpr int kHeldChunks = IS_HELD ? 4096 / kChunkElements : 1;
  // 64 bytes of padding put the two rows that a quarter of a warp reads at once into different banks.
  static constexpr int kRowPitch = kChunkBytes + 64;
  static constexpr int kSlotBytes = 8 * kRowPitch;    // half a tile

  static constexpr int kFragments = TILES * COLUMNS;
  static constexpr int kRound = kFragments < 2 ? kFragments : 2;   // fragments summed over the warps at once
  static constexpr int kSumBytes = kWarps * kRound * 32 * 16;
  // More than half an SM's, or two CTAs of one launch might share an SM that others left early, and another have none:
  // with 110 KB the chain of a layer's products took 119 us, not 110. Less than all: small kernels run beside this one.
  static constexpr int kMaxBytes = 200 * 1024;
  static constexpr int kSlots = (kMaxBytes - kSumBytes) / (kSlotBytes + 16);
  static constexpr int kSumOffset = kSlots * kSlotBytes;
  static constexpr int kBarrierOffset = kSumOffset + kSumBytes;
  static constexpr int kMailboxOffset = kBarrierOffset + 2 * kSlots * 8;
  static constexpr int kMail = 8;   // passes on their way from the queue: more than the ring can hold
  static constexpr int kTotalBytes = kMailboxOffset + kMail * (8 + 4);
};

}  // namespace slipstream
