// Sizes of the product of sorted rows with their experts' 4-bit weights, and the walk over a CTA's share that all its
// roles make in step.
//
// The rows of an expert are cut into tiles of up to 16 or 48. A tile is multiplied by strips of 16 of the expert's
// output features; gated, a unit is a strip of gate and the same strip of up. Tiles are cut into equal passes of up to
// 16 strips, as many as go round the CTAs without a rest (plan_passes), and whole passes are dealt out: a CTA whose run
// ended inside a tile would do two short ones, which take nearly as long as full ones. No sum crosses CTAs.
#pragma once

#include "params/expert_params.h"

namespace slipstream {

template <typename INPUT, typename OPERAND, int COLUMNS, int GROUPS, bool IS_GATED>
struct ExpertShape {
  using Input = INPUT;      // element of x in memory
  using Operand = OPERAND;  // of the products
  static constexpr int kGroups = GROUPS;
  static constexpr bool kIsGated = IS_GATED;
  static constexpr int kColumns = COLUMNS, kTileRows = 8 * COLUMNS;   // of 8 rows
  static constexpr int kStrips = 16, kUnit = IS_GATED ? 2 : 1, kPassUnits = kStrips / kUnit;

  // A stage is two blocks of 128 input features: four warps multiply the first, up to four strips each, four the
  // second.
  static constexpr int kBlocks = 2, kRowWarps = 4, kWarpStrips = kStrips / kRowWarps;
  static constexpr int kWarps = kBlocks * kRowWarps;
  // One more fills the ring; it comes with three idle ones, because registers change hands by four warps.
  static constexpr int kThreads = 32 * (kWarps + 4);
  static constexpr int kFillerRegisters = 40, kMultiplierRegisters = 232;

  static constexpr int kBlockBytes = 1024;                            // codes of a strip
  static constexpr int kCodeBytes = kStrips * kBlocks * kBlockBytes;   // of a stage
  static constexpr int kWordBytes = kStrips * kBlocks * 64 * GROUPS;
  static constexpr int kColumnBytes = 8 * 128 * 2;                    // 8 rows of a block
  static constexpr int kSumBytes = kBlocks * GROUPS * kTileRows * 8;   // of rows over groups, in front of them
  static constexpr int kRowBytes = kSumBytes + kColumns * kBlocks * kColumnBytes;
  static constexpr int kStageBytes = kCodeBytes + kWordBytes + kRowBytes;
  static constexpr int kRound = 2;   // strips of a warp whose sums are exchanged at once
  static constexpr int kExchangeBytes = kRound * kColumns * kRowWarps * 32 * 16;
  static constexpr int kMostExperts = 1024;
  static constexpr int kLeastUnits = 4;   // that a pass takes the time of, however short
  static constexpr int kUntilBytes = 4 * kMostExperts + 16;   // tiles_until, and passes of a tile
  static constexpr int kStages = (232448 - kExchangeBytes - kUntilBytes) / (kStageBytes + 16);
  static constexpr int kExchangeOffset = kStages * kStageBytes;
  static constexpr int kUntilOffset = kExchangeOffset + kExchangeBytes;
  static constexpr int kBarrierOffset = kUntilOffset + kUntilBytes;
  static constexpr int kTotalBytes = kBarrierOffset + 16 * kStages;
  static_assert(kTotalBytes <= 232448 && kStages >= 3);
};

// tiles_until[e] = tiles of the experts up to e; by one warp. Returns their number.
__device__ __forceinline__ int count_tiles(const ExpertParams& p, int tile_rows, int* tiles_until) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int first = 0; first < p.num_experts; first += 32) {
    const int expert = first + lane;
    const int rows = expert < p.num_experts ? __ldcg(p.offsets + expert + 1) - __ldcg(p.offsets + expert) : 0;
    int until = (rows + tile_rows - 1) / tile_rows;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, until, distance);
      if (lane >= distance) until += other;
    }
    if (expert < p.num_experts) tiles_until[expert] = before + until;
    before += __shfl_sync(~0u, until, 31);
  }
  return before;
}

struct RowTile {
  int expert, first_row, num_rows;
};

__device__ __forceinline__ RowTile tile_at(const ExpertParams& p, int tile_rows, const int* tiles_until, int tile) {
  int low = 0, high = p.num_experts - 1;   // the first expert whose tiles end behind the tile
  while (low < high) {
    const int middle = (low + high) / 2;
    tiles_until[middle] > tile ? high = middle : low = middle + 1;
  }
  const int before = low == 0 ? 0 : tiles_until[low - 1];
  const int first_row = __ldcg(p.offsets + low) + (tile - before) * tile_rows;
  return {low, first_row, min(tile_rows, __ldcg(p.offsets + low + 1) - first_row)};
}

// Units of one tile that are multiplied together.
struct Pass {
  RowTile rows;
  int tile, unit, num_units;
};

// count_tiles, and behind them the number of passes of a tile. Of the lengths that a pass may have (a lane each) that
// with the least time: passes of the CTA that has most, times the units of one, of which kLeastUnits are free.
template <typename SHAPE>
__device__ __forceinline__ void plan_passes(const ExpertParams& p, int* tiles_until) {
  const int tiles = max(count_tiles(p, SHAPE::kTileRows, tiles_until), 1), lane = threadIdx.x % 32;
  const int units = p.out_features / (16 * SHAPE::kUnit), length = lane % SHAPE::kPassUnits + 1;
  const int passes = (units + length - 1) / length, rounds = (tiles * passes + p.num_ctas - 1) / p.num_ctas;
  const int cost = rounds * (16 * max(length, SHAPE::kLeastUnits) + length + 8);
  const int least = __reduce_min_sync(~0u, cost);
  const int chosen = __ffs(__ballot_sync(~0u, cost == least)) - 1;
  const int even = __shfl_sync(~0u, max(passes, rounds * p.num_ctas / tiles), chosen);   // as many as the rounds have room for
  if (lane == 0) tiles_until[SHAPE::kMostExperts] = min(even, units);
}

template <typename SHAPE>
struct PassWalk {
  const ExpertParams& p;
  const int* tiles_until;
  int units, passes, next, end;   // of a tile; of a tile; passes of all tiles, one after the other

  __device__ __forceinline__ PassWalk(const ExpertParams& params, const int* until)
      : p(params), tiles_until(until), units(params.out_features / (16 * SHAPE::kUnit)), passes(until[SHAPE::kMostExperts]) {
    const int64_t all = int64_t{until[params.num_experts - 1]} * passes;
    next = static_cast<int>(all * blockIdx.x / params.num_ctas);
    end = static_cast<int>(all * (blockIdx.x + 1) / params.num_ctas);
  }

  __device__ __forceinline__ bool is_done() const { return next >= end; }

  __device__ __forceinline__ Pass take() {
    const int tile = next / passes, pass = next - tile * passes;
    const int unit = units * pass / passes;
    ++next;
    return {tile_at(p, SHAPE::kTileRows, tiles_until, tile), tile, unit, units * (pass + 1) / passes - unit};
  }
};

// The walk over a CTA's stages: SHAPE::kBlocks blocks of input features of each pass.
template <typename SHAPE>
struct StageWalk {
  PassWalk<SHAPE> walk;
  Pass pass;
  int block = 0, blocks;
  bool has_more;

  __device__ __forceinline__ StageWalk(const ExpertParams& p, const int* tiles_until)
      : walk(p, tiles_until), blocks(p.in_features / 128), has_more(!walk.is_done()) {
    if (has_more) pass = walk.take();
  }

  __device__ __forceinline__ int count() const { return min(SHAPE::kBlocks, blocks - block); }

  __device__ __forceinline__ void advance() {
    block += SHAPE::kBlocks;
    if (block < blocks) return;
    block = 0, has_more = !walk.is_done();
    if (has_more) pass = walk.take();
  }
};

// Strips of a warp: those of number i of all four stand side by side, so that a short pass is shared evenly.
template <typename SHAPE>
__device__ __forceinline__ int unit_of(int warp, int i) {
  return i / SHAPE::kUnit * SHAPE::kRowWarps + warp;
}
// Where a strip's codes (or words) lie in a stage; `bytes` of them a strip, of full pairs `full_bytes`.
template <typename SHAPE>
__device__ __forceinline__ int place_of(int warp, int i, int bytes, int full_bytes) {
  return i % SHAPE::kUnit * SHAPE::kPassUnits * full_bytes + unit_of<SHAPE>(warp, i) * bytes;
}

}  // namespace slipstream
