// The products of some output features of an expert by a tile of its rows, with MXFP4 weights: e2m1, and a power of two
// for each group of 32 input features, in the order of grouped_mxfp4_layout.py.
//
// The time of few rows is that of instructions, unless there are few of them: copies are the copy engine's, codes lie in
// words so that five masks, a shift and three products take eight of them apart, and x needs no other order. Sums of
// the teams, each of its own input features, are added in shared memory.
#pragma once

#include "formats/mxfp4_words.cuh"
#include "pipeline/grouped_mxfp4_load.cuh"

namespace slipstream {

// A lane's weights of a unit: of tiles of 16 output features two rows (l / 4 and + 8), of each 16 input features of a group.
template <int TILES>
struct Mxfp4Unit {
  uint4 codes[TILES];
  uint32_t scales;   // bytes by tile and row

  __device__ __forceinline__ explicit Mxfp4Unit(uint32_t from, int scale_offset) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) codes[tile] = load_shared_16(from + 512 * tile + 16 * lane);
    scales = load_shared_4(from + scale_offset + 4 * (lane / 2));
  }

  __device__ __forceinline__ uint32_t word(int tile, int half, int of_row) const {
    const uint4& all = codes[tile];
    return half == 0 ? (of_row == 0 ? all.x : all.y) : (of_row == 0 ? all.z : all.w);
  }
};

template <typename SHAPE>
struct GroupedMxfp4Tile {
  static constexpr int kTiles = SHAPE::kTiles, kColumns = SHAPE::kColumns;
  using Sums = float[kTiles][kColumns][4];   // features l / 4 and + 8 of a tile, rows 2 (l % 4) + 0, 1 of a column
  using Unit = Mxfp4Unit<kTiles>;

  // sums += a unit's weights by the same input features of the rows.
  static __device__ __forceinline__ void multiply(const Unit& weights, const Mxfp4Rows<SHAPE>& rows, int unit, Sums& sums) {
    uint32_t factors[kTiles][2];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) factors[i / 2][i % 2] = mxfp4_factor(weights.scales, i);
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      uint32_t pairs[kColumns][4];
      rows.read(unit, word, pairs);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint32_t low[4], high[4];
        expand_e2m1(weights.word(tile, 0, word), factors[tile][0], low);
        expand_e2m1(weights.word(tile, 1, word), factors[tile][1], high);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint32_t operand[4] = {low[2 * step], high[2 * step], low[2 * step + 1], high[2 * step + 1]};
#pragma unroll
          for (int column = 0; column < kColumns; ++column) {
            multiply_add<__nv_bfloat16>(sums[tile][column], operand, pairs[column][2 * step], pairs[column][2 * step + 1]);
          }
        }
      }
    }
  }

  // Stores what a warp has, from its first feature on.
  static __device__ __forceinline__ void store(const Sums& sums, float* shared) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTiles * kColumns * 4; ++i) {
      const int tile = i / 4 / kColumns, column = i / 4 % kColumns, e = i % 4;
      const int row = 8 * column + 2 * (lane % 4) + e % 2, feature = 16 * tile + lane / 4 + e / 2 * 8;
      shared[row * SHAPE::kSumStride + feature] = sums[tile][column][e];
    }
  }

  // Adds up what the teams have, in their order, and writes the rows.
  static __device__ __forceinline__ void write(const GroupedGemmParams& p, const TokenTile& rows, int first_feature,
                                               const float* shared) {
    constexpr int kPairs = SHAPE::kFeatures / 2;
    for (int item = threadIdx.x; item < SHAPE::kTileRows * kPairs; item += SHAPE::kThreads) {
      const int row = item / kPairs, feature = item % kPairs * 2;
      if (row >= rows.num_rows) break;
      if (first_feature + feature >= p.out_features) continue;
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int team = 0; team < SHAPE::kTeams; ++team) {
        const float* part = shared + (team * SHAPE::kTileRows + row) * SHAPE::kSumStride + feature;
        sum.x += part[0], sum.y += part[1];
      }
      const int64_t place = static_cast<int64_t>(rows.first_row + row) * p.out_features + first_feature + feature;
      *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.out) + place) =
          pack<__nv_bfloat16>(sum.x * kMxfp4Unit, sum.y * kMxfp4Unit);
    }
  }
};

// sums = the products of the warp's output features by its team's units, times 2^-32.
template <typename SHAPE>
__device__ __forceinline__ void multiply_units(const GroupedGemmParams& p, const TokenTile& tile, int first_feature,
                                               char* memory, typename GroupedMxfp4Tile<SHAPE>::Sums& sums) {
  using Tile = GroupedMxfp4Tile<SHAPE>;
  const int warp = threadIdx.x / 32, team = warp / SHAPE::kTeamWarps;
  const bool has_features = first_feature < p.out_features;
  const int units = SHAPE::Unit::count(p.in_features);
  const int begin = team * units / SHAPE::kTeams, end = (team + 1) * units / SHAPE::kTeams;
  const int64_t row = static_cast<int64_t>(tile.expert) * p.out_features + first_feature;
  const char* first = reinterpret_cast<const char*>(p.qweight) + (row / SHAPE::Unit::kFeatures * units + begin) * SHAPE::Unit::kBytes;
  const uint32_t shared = shared_address(memory);
  Mxfp4Weights<SHAPE> weights(first, has_features ? end - begin : 0, shared + warp * SHAPE::kRingBytes,
                              shared + SHAPE::kBarrierOffset + 8 * SHAPE::kStages * warp);
  const auto** pointers = reinterpret_cast<const __nv_bfloat16**>(memory + SHAPE::kPointerOffset);
  if (threadIdx.x < tile.num_rows) pointers[threadIdx.x] = row_of_x<__nv_bfloat16>(p, tile, threadIdx.x);
  __syncthreads();
  Mxfp4Rows<SHAPE> rows(pointers, tile.num_rows, p.in_features, SHAPE::Unit::kInputs * begin, SHAPE::Unit::kInputs * end,
                        shared + SHAPE::kRowsOffset + team * SHAPE::kTeamRowBytes);
#pragma unroll
  for (int i = 0; i < SHAPE::kTiles * SHAPE::kColumns * 4; ++i) sums[i / 4 / SHAPE::kColumns][i / 4 % SHAPE::kColumns][i % 4] = 0.0f;
#pragma unroll 1
  for (int unit = 0; unit < end - begin; unit += SHAPE::kStageUnits) {
    if (unit % SHAPE::kRowUnits == 0) rows.advance(team);
    if (!has_features) continue;
    const uint32_t stage = weights.wait();
#pragma unroll
    for (int of_stage = 0; of_stage < SHAPE::kStageUnits; of_stage += 2) {
      const int of_team = unit + of_stage, of_rows = of_team % SHAPE::kRowUnits;
      const uint32_t from = stage + of_stage * SHAPE::Unit::kBytes;
      const typename Tile::Unit one(from, SHAPE::Unit::kScaleOffset), two(from + SHAPE::Unit::kBytes, SHAPE::Unit::kScaleOffset);
      if (of_stage + 2 == SHAPE::kStageUnits) weights.release();
      if (of_team < end - begin) Tile::multiply(one, rows, of_rows, sums);
      if (of_team + 1 < end - begin) Tile::multiply(two, rows, of_rows + 1, sums);
    }
  }
}

// One CTA: some output features by a tile of tokens; a tile that no expert has is left alone. memory: kTotalBytes.
template <typename SHAPE>
__device__ __forceinline__ void multiply_grouped_mxfp4(const GroupedGemmParams& p, int feature_tile, int token_tile, char* memory) {
  const TokenTile tile = find_token_tile(p, SHAPE::kTileRows, token_tile);
  if (tile.num_rows == 0) return;
  const int warp = threadIdx.x / 32, first_feature = feature_tile * SHAPE::kFeatures;
  const int of_team = SHAPE::Unit::kFeatures * (warp % SHAPE::kTeamWarps);
  typename GroupedMxfp4Tile<SHAPE>::Sums sums;
  multiply_units<SHAPE>(p, tile, first_feature + of_team, memory, sums);
  __syncthreads();   // sums take the place of weights and rows of x
  float* shared = reinterpret_cast<float*>(memory);
  const int team = warp / SHAPE::kTeamWarps;
  GroupedMxfp4Tile<SHAPE>::store(sums, shared + team * SHAPE::kTileRows * SHAPE::kSumStride + of_team);
  __syncthreads();
  GroupedMxfp4Tile<SHAPE>::write(p, tile, first_feature, shared);
}

}  // namespace slipstream
