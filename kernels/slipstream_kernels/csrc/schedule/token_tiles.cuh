// Tiles of tokens: the rows of an expert, cut into tiles of up to tile_rows rows. Only the device knows how many there are.
#pragma once

#include "params/grouped_gemm_params.h"
#include "ptx/warp_scan.cuh"

namespace slipstream {

// token_tile_ends[e] = number of tiles of tokens of the experts 0..e; by one warp. Returns the number of all.
__device__ __forceinline__ int count_token_tiles(const GroupedGemmParams& p, int tile_rows, int* token_tile_ends) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int first = 0; first < p.num_experts; first += 32) {
    const int expert = first + lane;
    const int rows = expert < p.num_experts ? __ldcg(p.offsets + expert + 1) - __ldcg(p.offsets + expert) : 0;
    const int until = inclusive_sum((rows + tile_rows - 1) / tile_rows);
    if (expert < p.num_experts) token_tile_ends[expert] = before + until;
    before += __shfl_sync(~0u, until, 31);
  }
  return before;
}

struct TokenTile {
  int expert, first_row, num_rows;
};

// The row of x that a row of the tile takes. T: of its elements.
template <typename T>
__device__ __forceinline__ const T* row_of_x(const GroupedGemmParams& p, const TokenTile& rows, int row) {
  const int64_t place = p.tokens == nullptr ? rows.first_row + row : p.tokens[rows.first_row + row];
  return static_cast<const T*>(p.x) + place * p.x_row_stride;
}

// The tile of that number, found by each warp that asks; without rows if no expert has it.
__device__ __forceinline__ TokenTile find_token_tile(const GroupedGemmParams& p, int tile_rows, int token_tile) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int first = 0; first < p.num_experts; first += 32) {
    const int expert = first + lane;
    const int begin = expert < p.num_experts ? __ldcg(p.offsets + expert) : 0;
    const int rows = expert < p.num_experts ? __ldcg(p.offsets + expert + 1) - begin : 0;
    const int tiles = (rows + tile_rows - 1) / tile_rows;
    const int until = inclusive_sum(tiles);
    const int of_expert = token_tile - before - until + tiles;
    const unsigned owner = __ballot_sync(~0u, of_expert >= 0 && of_expert < tiles);
    if (owner != 0) {
      const int from = __ffs(static_cast<int>(owner)) - 1, skipped = of_expert * tile_rows;
      return {first + from, __shfl_sync(~0u, begin + skipped, from), __shfl_sync(~0u, min(tile_rows, rows - skipped), from)};
    }
    before += __shfl_sync(~0u, until, 31);
  }
  return {0, 0, 0};
}

__device__ __forceinline__ TokenTile token_tile_at(const GroupedGemmParams& p, int tile_rows, const int* token_tile_ends,
                                                   int token_tile) {
  int low = 0, high = p.num_experts - 1;   // searches the first expert whose end is above token_tile
  while (low < high) {
    const int middle = (low + high) / 2;
    token_tile_ends[middle] > token_tile ? high = middle : low = middle + 1;
  }
  const int before = low == 0 ? 0 : token_tile_ends[low - 1];
  const int first_row = __ldcg(p.offsets + low) + (token_tile - before) * tile_rows;
  return {low, first_row, min(tile_rows, __ldcg(p.offsets + low + 1) - first_row)};
}

}  // namespace slipstream
