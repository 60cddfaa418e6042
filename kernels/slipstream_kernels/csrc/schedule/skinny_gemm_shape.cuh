// Sizes of one variant of the skinny GEMM.
//
// A CTA makes passes of kTiles tiles of 16 weight rows. A pass has consecutive outputs (columns of the result: a weight
// row each, or gate and up rows), so that no sum crosses CTAs. The passes of a CTA cover an equal part of all outputs, or,
// where there are many, come from a queue: memory serves SMs unevenly, by up to a third. A pass goes through the input
// features in chunks of kChunkBytes; each half (8 rows) of a tile's chunk is one stage of the ring.
#pragma once

#include "params/skinny_gemm_params.h"

namespace slipstream {

template <typename FORMAT, int TILES, int COLUMNS, bool IS_GATED, bool IS_RESIDENT>
struct SkinnyGemmShape {
  using Format = FORMAT;
  using Operand = typename FORMAT::Operand;
  static constexpr int kTiles = TILES;              // 16-row tiles of a pass: share one read of the activations
  static constexpr int kColumns = COLUMNS;          // 8-token columns
  static constexpr bool kIsGated = IS_GATED;
  static constexpr bool kIsResident = IS_RESIDENT;  // activations stay in registers, instead of one read a pass
  static constexpr int kOutputsPerTile = IS_GATED ? 8 : 16;
  static constexpr int kOutputsPerPass = TILES * kOutputsPerTile;

  static constexpr int kWarps = 8;                  // consumers, each with its own columns of every chunk
  static constexpr int kProducers = 2;              // each brings every second stage
  static constexpr int kThreads = 32 * (kWarps + kProducers);
  static constexpr int kSpanBytes = 64;
  // Spans of one warp in a chunk. A bulk copy of any size takes about 28 ns of an SM's copy engine: rows of 1 KB just keep up
  // with memory. More spans need more registers for activations.
  static constexpr int kSpans = FORMAT::kElements * COLUMNS <= 16 ? 4 : 2;
  static constexpr int kGroup = FORMAT::kGroupSpans;  // spans that are multiplied together, with one scale if any
  static constexpr int kChunkBytes = kWarps * kSpans * kSpanBytes;
  static constexpr int kSpanElements = 4 * FORMAT::kElements;
  static constexpr int kSliceElements = kSpans * kSpanElements;
  static constexpr int kChunkElements = kWarps * kSliceElements;
  static constexpr int kResidentChunks = IS_RESIDENT ? 4096 / kChunkElements : 1;
  // 64 bytes of padding put the two rows that a quarter of a warp reads at once into different banks.
  static constexpr int kRowPitch = kChunkBytes + 64;
  static constexpr int kStageBytes = 8 * kRowPitch;    // half a tile

  static constexpr int kFragments = TILES * COLUMNS;
  static constexpr int kRound = kFragments < 2 ? kFragments : 2;   // fragments summed over the warps at once
  static constexpr int kSumBytes = kWarps * kRound * 32 * 16;
  // More than half of an SM's, or two CTAs of one launch might share an SM and leave another without: with 110 KB the
  // products of a layer took 119 us instead of 110. Less than all: small kernels run beside this one.
  static constexpr int kMaxBytes = 200 * 1024;
  static constexpr int kStages = (kMaxBytes - kSumBytes) / (kStageBytes + 16);
  static constexpr int kSumOffset = kStages * kStageBytes;
  static constexpr int kBarrierOffset = kSumOffset + kSumBytes;
  static constexpr int kQueueOffset = kBarrierOffset + 2 * kStages * 8;
  static constexpr int kQueueEntries = 8;   // drawn passes that not all warps have read: more than the ring holds
  static constexpr int kTotalBytes = kQueueOffset + kQueueEntries * (8 + 4);
};

}  // namespace slipstream
