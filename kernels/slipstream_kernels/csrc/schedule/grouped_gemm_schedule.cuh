// The schedule of the grouped GEMMs with experts' 4-bit weights: all roles of a CTA walk it in step.
//
// The rows of an expert are cut into tiles of tokens (up to kTileRows rows). A tile of tokens is multiplied by the
// expert's work items: an item is a tile of 16 output features, or, gated, a tile of gate and the same tile of up. The
// items of a tile of tokens are cut into equal passes; plan_passes chooses their number so that the passes of all tiles
// divide evenly among the CTAs. A CTA takes whole passes: one that ended inside a tile of tokens would make two short
// passes, which take nearly as long as full ones. No sum crosses CTAs.
#pragma once

#include "schedule/token_tiles.cuh"

namespace slipstream {

// Work items of one tile of tokens that are multiplied together.
struct Pass {
  TokenTile rows;
  int token_tile, item, num_items;
};

// Calls count_token_tiles and writes the number of passes of a tile of tokens behind its counts. Each lane estimates the
// time of one pass length: the most passes of any CTA, times the items of a pass, at least kMinItems. The least wins.
template <typename SHAPE>
__device__ __forceinline__ void plan_passes(const GroupedGemmParams& p, int* token_tile_ends) {
  const int token_tiles = max(count_token_tiles(p, SHAPE::kTileRows, token_tile_ends), 1), lane = threadIdx.x % 32;
  const int items = p.out_features / (16 * SHAPE::kItemTiles), length = lane % SHAPE::kPassItems + 1;
  const int passes = (items + length - 1) / length, rounds = (token_tiles * passes + p.num_ctas - 1) / p.num_ctas;
  const int cost = rounds * (16 * max(length, SHAPE::kMinItems) + length + 8);
  const int least = __reduce_min_sync(~0u, cost);
  const int chosen = __ffs(__ballot_sync(~0u, cost == least)) - 1;
  // As many passes as all CTAs make in these rounds.
  const int even = __shfl_sync(~0u, max(passes, rounds * p.num_ctas / token_tiles), chosen);
  if (lane == 0) token_tile_ends[SHAPE::kMaxExperts] = min(even, items);
}

template <typename SHAPE>
struct PassWalk {
  const GroupedGemmParams& p;
  const int* token_tile_ends;
  int items, passes;   // of a tile of tokens
  int next, end;       // of the CTA, in the passes of all tiles of tokens

  __device__ __forceinline__ PassWalk(const GroupedGemmParams& params, const int* ends)
      : p(params), token_tile_ends(ends), items(params.out_features / (16 * SHAPE::kItemTiles)),
        passes(ends[SHAPE::kMaxExperts]) {
    const int64_t all = int64_t{ends[params.num_experts - 1]} * passes;
    next = static_cast<int>(all * blockIdx.x / params.num_ctas);
    end = static_cast<int>(all * (blockIdx.x + 1) / params.num_ctas);
  }

  __device__ __forceinline__ bool is_done() const { return next >= end; }

  __device__ __forceinline__ Pass take() {
    const int token_tile = next / passes, pass = next - token_tile * passes;
    const int item = items * pass / passes;
    ++next;
    const TokenTile rows = token_tile_at(p, SHAPE::kTileRows, token_tile_ends, token_tile);
    return {rows, token_tile, item, items * (pass + 1) / passes - item};
  }
};

// The walk over a CTA's stages: a stage is kBlocks blocks of 128 input features of a pass.
template <typename SHAPE>
struct StageWalk {
  PassWalk<SHAPE> walk;
  Pass pass;
  int block = 0, blocks;
  bool has_more;

  __device__ __forceinline__ StageWalk(const GroupedGemmParams& p, const int* token_tile_ends)
      : walk(p, token_tile_ends), blocks(p.in_features / 128), has_more(!walk.is_done()) {
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

}  // namespace slipstream
