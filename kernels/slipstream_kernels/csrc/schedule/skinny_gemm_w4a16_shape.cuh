// Sizes of one variant of the skinny W4A16 GEMM, and the order of a CTA's weights.
//
// A CTA owns consecutive tiles of 16 output features: no sum crosses CTAs. Gated, tiles of gate and up alternate, so that a
// CTA has both of a pair. A pass has kTiles tiles and goes through the input features in chunks of 8 blocks of 128, one for
// each of the 8 consumer warps; a tile's chunk is one stage of the ring. The warps' sums are added at the end of a pass.
#pragma once

#include "params/skinny_gemm_w4a16_params.h"
#include "schedule/work_range.cuh"

namespace slipstream {

template <typename OPERAND, int TILES, int COLUMNS, int GROUPS, bool IS_GATED>
struct SkinnyGemmW4A16Shape {
  using Operand = OPERAND;   // element of x
  static constexpr int kTiles = TILES, kColumns = COLUMNS, kGroups = GROUPS;   // tiles of a pass; tokens / 8; groups of a block
  static constexpr bool kIsGated = IS_GATED;
  static constexpr int kItemTiles = IS_GATED ? 2 : 1;   // tiles that one CTA must have: gate and up
  static_assert(TILES % kItemTiles == 0);

  static constexpr int kWarps = 8;   // consumers; one more warp fills the ring
  static constexpr int kThreads = 32 * (kWarps + 1);
  static constexpr int kCtasPerSm = COLUMNS == 1 ? 2 : 1;   // as registers allow
  static constexpr int kBlockBytes = 1024;            // of a tile
  static constexpr int kScaleBytes = 16 * 4 * GROUPS;  // of a tile's block
  static constexpr int kScaleOffset = kWarps * kBlockBytes;
  static constexpr int kStageBytes = kWarps * (kBlockBytes + kScaleBytes);

  static constexpr int kFragments = TILES * COLUMNS;
  static constexpr int kRound = kFragments < 4 ? kFragments : 4;   // fragments summed over the warps at once
  static constexpr int kSumBytes = kWarps * kRound * 32 * 16;
  // Two CTAs share an SM: those of one launch overlap their latencies, and the ring of the next launch fills while this one
  // ends.
  static constexpr int kStages = (113664 - kSumBytes) / (kStageBytes + 16);
  static constexpr int kSumOffset = kStages * kStageBytes;
  static constexpr int kBarrierOffset = kSumOffset + kSumBytes;
  static constexpr int kTotalBytes = kBarrierOffset + 16 * kStages;
  static_assert(kTotalBytes <= 113664 && kSumOffset % 16 == 0);
};

// The tiles of a CTA: an equal part for each SM, halved between the two CTAs that share it (c and c + num_ctas / 2).
template <typename SHAPE>
__device__ __forceinline__ WorkRange tiles_of_cta(const SkinnyGemmW4A16Params& p) {
  const int64_t items = p.out_features / (16 * SHAPE::kItemTiles);
  const int num_sms = p.num_ctas / p.ctas_per_sm, sm = blockIdx.x % num_sms;
  int begin = static_cast<int>(items * sm / num_sms), end = static_cast<int>(items * (sm + 1) / num_sms);
  if (p.ctas_per_sm == 2) {
    const int middle = begin + (end - begin + 1) / 2;
    static_cast<int>(blockIdx.x) < num_sms ? end = middle : begin = middle;
  }
  return {begin * SHAPE::kItemTiles, end * SHAPE::kItemTiles};
}

// The tile of the weight that has this index in the order of CTAs.
template <typename SHAPE>
__device__ __forceinline__ int tile_at(const SkinnyGemmW4A16Params& p, int index) {
  return SHAPE::kIsGated ? index / 2 + index % 2 * (p.out_features / 32) : index;
}

__device__ __forceinline__ int num_blocks(const SkinnyGemmW4A16Params& p) { return p.in_features / 128; }

template <typename SHAPE>
__device__ __forceinline__ int num_chunks(const SkinnyGemmW4A16Params& p) {
  return (num_blocks(p) + SHAPE::kWarps - 1) / SHAPE::kWarps;
}

}  // namespace slipstream
