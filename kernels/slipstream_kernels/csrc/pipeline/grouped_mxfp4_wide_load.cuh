// What the grouped GEMM with MXFP4 weights on warpgroup products reads: rows of x, which a kernel before has put in the
// order of shared memory, and weights, by bulk copies.
#pragma once

#include "pipeline/grouped_mxfp4_load.cuh"
#include "schedule/grouped_mxfp4_wide_shape.cuh"

namespace slipstream {

// Writes rows of x to permuted_x: [tile of tokens][unit of 64 input features][row of the tile] of 128 bytes, swizzled.
//
// A product sums 16 input features: its column 2 t + e is pair 0 of a word of lane t of a row's four, column 8 + 2 t + e is
// pair 1, and the word's other pairs are the next product's. Word w of lane t has input features 16 t + 8 w and on
// (grouped_mxfp4_layout.py). A warp moves 8 rows of kWarpUnits units; zeros lie beyond the rows' ends, and rows that do not
// exist are left as they are: nobody writes their sums.
struct Mxfp4RowPermutation {
  static constexpr int kWarpUnits = 8, kUnitsAtOnce = 2;
  const GroupedGemmParams& p;
  int tile_rows;

  __device__ __forceinline__ void run(int token_tile, int rows_of_warp, int first_unit) const {
    const TokenTile tile = find_token_tile(p, tile_rows, token_tile);
    const int lane = threadIdx.x % 32, row = 8 * rows_of_warp + lane % 8, word = lane / 8 % 2;
    if (row >= tile.num_rows) return;
    const int units = GroupedMxfp4Unit::count(p.in_features);
    const __nv_bfloat16* from = row_of_x(p, tile, row);
    char* to = static_cast<char*>(p.permuted_x) + static_cast<int64_t>(token_tile) * units * tile_rows * 128;
#pragma unroll
    for (int i = 0; i < kWarpUnits; i += kUnitsAtOnce) {
      const int unit = first_unit + i + lane / 16, feature = GroupedMxfp4Unit::kInputs * unit + 8 * word;
      if (unit >= units) continue;
      uint4 of[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        of[t] = feature + 16 * t < p.in_features ? load_global_16(from + feature + 16 * t) : make_uint4(0, 0, 0, 0);
      }
      char* of_row = to + (static_cast<int64_t>(unit) * tile_rows + row) * 128;
      store(of_row, 4 * word, make_uint4(of[0].x, of[1].x, of[2].x, of[3].x));
      store(of_row, 4 * word + 1, make_uint4(of[0].y, of[1].y, of[2].y, of[3].y));
      store(of_row, 4 * word + 2, make_uint4(of[0].z, of[1].z, of[2].z, of[3].z));
      store(of_row, 4 * word + 3, make_uint4(of[0].w, of[1].w, of[2].w, of[3].w));
    }
  }

 private:
  static __device__ __forceinline__ void store(char* row, int chunk, uint4 values) {
    *reinterpret_cast<uint4*>(row + 16 * (chunk ^ (threadIdx.x % 8))) = values;
  }
};

// Asks for all stages of a CTA; one thread.
template <typename SHAPE>
__device__ __forceinline__ void copy_mxfp4_stages(const GroupedGemmParams& p, int expert, int token_tile, int first_feature,
                                                  const GroupedMxfp4WideMemory<SHAPE>& memory) {
  using Unit = typename SHAPE::Unit;
  const int units = Unit::count(p.in_features), blocks = min(SHAPE::kBlocks, (p.out_features - first_feature) / Unit::kFeatures);
  const int64_t row = static_cast<int64_t>(expert) * p.out_features + first_feature;
  const char* weights = reinterpret_cast<const char*>(p.qweight) + row / Unit::kFeatures * units * Unit::kBytes;
  const char* rows = static_cast<const char*>(p.permuted_x) + static_cast<int64_t>(token_tile) * units * SHAPE::kSlabBytes;
  const uint64_t once = evict_first_policy(), again = keep_policy();
  PipelineState<SHAPE::kStages> state;
#pragma unroll 1
  for (int first = 0; first < units; first += SHAPE::kStageUnits) {
    if (first >= SHAPE::kStages * SHAPE::kStageUnits) wait_barrier(memory.empty(state.stage), state.parity ^ 1);
    const uint32_t full = memory.full(state.stage);
    const int of_stage = min(SHAPE::kStageUnits, units - first);
    arrive_expecting(full, of_stage * (SHAPE::kSlabBytes + blocks * Unit::kBytes));
    for (int block = 0; block < blocks; ++block) {
      const char* from = weights + (static_cast<int64_t>(block) * units + first) * Unit::kBytes;
      copy_bulk(memory.block(state.stage, block), from, of_stage * Unit::kBytes, full, once);
    }
    copy_bulk(memory.rows(state.stage, 0), rows + static_cast<int64_t>(first) * SHAPE::kSlabBytes, of_stage * SHAPE::kSlabBytes, full, again);
    state.advance();
  }
}

}  // namespace slipstream
