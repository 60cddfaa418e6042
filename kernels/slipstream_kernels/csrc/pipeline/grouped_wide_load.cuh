// What the grouped GEMM with 4-bit weights on warpgroup products reads: rows of x, which a kernel before has put in the
// order of shared memory, and weights, by bulk copies.
#pragma once

#include "formats/grouped_wide_formats.cuh"
#include "ptx/memory_access.cuh"
#include "schedule/grouped_wide_shape.cuh"
#include "schedule/token_tiles.cuh"

namespace slipstream {

// Writes rows of x to permuted_x: [tile of tokens][unit of 64 input features][row of the tile] of 128 bytes, swizzled, in
// the format's order of input features. A warp moves 8 rows of two units; zeros lie beyond the rows' ends, and rows that do
// not exist are left as they are: nobody writes their sums.
template <typename SHAPE>
struct WideRowPermutation {
  static constexpr int kWarpUnits = 2, kGroups = SHAPE::kTileRows / 8;   // of rows of a tile
  const GroupedGemmParams& p;

  static __host__ __device__ int count_units(int in_features) { return (in_features + SHAPE::kInputs - 1) / SHAPE::kInputs; }

  __device__ __forceinline__ void run(int group, int first_unit) const {
    const int token_tile = group / kGroups, lane = threadIdx.x % 32, word = lane / 8 % 2;
    const int row = 8 * (group % kGroups) + lane % 8;
    const TokenTile tile = find_token_tile(p, SHAPE::kTileRows, token_tile);
    if (row >= tile.num_rows) return;
    const int units = count_units(p.in_features);
    const auto* from = row_of_x<typename SHAPE::Operand>(p, tile, row);
    const int unit = first_unit + lane / 16;
    if (unit >= units) return;
    char* to = static_cast<char*>(p.permuted_x) + (static_cast<int64_t>(token_tile) * units + unit) * SHAPE::kSlabBytes;
    move_word(from + SHAPE::kInputs * unit, to + 128 * row, word, p.in_features - SHAPE::kInputs * unit);
  }

 private:
  // inputs: that exist from `from` on.
  static __device__ __forceinline__ void move_word(const typename SHAPE::Operand* from, char* row, int word, int inputs) {
    uint32_t parts[4][4];
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int first = SHAPE::Format::first_input(word, part);
      const uint4 raw = first < inputs ? load_global_16(from + first) : make_uint4(0, 0, 0, 0);
      parts[part][0] = raw.x, parts[part][1] = raw.y, parts[part][2] = raw.z, parts[part][3] = raw.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int chunk = (4 * word + i) ^ static_cast<int>(threadIdx.x % 8);
      *reinterpret_cast<uint4*>(row + 16 * chunk) = SHAPE::Format::pairs_of_lanes(parts, i);
    }
  }
};

// Asks for all stages of a CTA; one thread.
template <typename SHAPE>
__device__ __forceinline__ void copy_wide_stages(const GroupedGemmParams& p, int expert, int token_tile, int first_feature,
                                                 const GroupedWideMemory<SHAPE>& memory) {
  const int units = WideRowPermutation<SHAPE>::count_units(p.in_features);
  const char* rows = static_cast<const char*>(p.permuted_x) + static_cast<int64_t>(token_tile) * units * SHAPE::kSlabBytes;
  const uint64_t once = evict_first_policy(), again = keep_policy();
  PipelineState<SHAPE::kStages> state;
#pragma unroll 1
  for (int first = 0; first < units; first += SHAPE::kStageUnits) {
    if (first >= SHAPE::kStages * SHAPE::kStageUnits) wait_barrier(memory.empty(state.stage), state.parity ^ 1);
    const uint32_t full = memory.full(state.stage);
    const WideStage stage{expert, first_feature, first, min(SHAPE::kStageUnits, units - first), memory.weights(state.stage), full};
    const int row_bytes = stage.units * SHAPE::kSlabBytes;
    arrive_expecting(full, row_bytes + SHAPE::Format::copied_bytes(p, stage));
    SHAPE::Format::template copy<SHAPE::kStageUnits>(p, stage, once);
    copy_bulk(memory.rows(state.stage), rows + static_cast<int64_t>(first) * SHAPE::kSlabBytes, row_bytes, full, again);
    state.advance();
  }
}

}  // namespace slipstream
