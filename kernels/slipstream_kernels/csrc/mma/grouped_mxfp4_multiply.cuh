// The products of 32 output features of an expert by a tile of its rows, with MXFP4 weights in canonical order: e2m1, and
// a power of two for each group of 32 input features. Four warps divide the input features; each streams its weights from
// memory to registers, some blocks ahead.
//
// A block is 128 input features: lane 4 i + j holds group j of row i of a tile (i + 8: the other half), 16 bytes of
// weights and one scale. The products of a lane's quad may take input features in any order, as long as weights and rows
// of x take the same: each step takes four features of each of the quad's four groups.
#pragma once

#include "mma/warp_mma.cuh"
#include "ptx/memory_access.cuh"
#include "schedule/token_tiles.cuh"

namespace slipstream {

template <int COLUMNS>
struct GroupedMxfp4Shape {
  static constexpr int kColumns = COLUMNS, kTileRows = 8 * COLUMNS;   // a column: 8 rows of a tile of tokens
  static constexpr int kTiles = 2, kFeatures = 16 * kTiles;           // of a CTA
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kStages = 2;                                   // blocks of a warp that are on their way
  static constexpr int kCtas = 4;                                     // of an SM, at once: measured faster than deeper stages
  static constexpr int kSumStride = kFeatures + 2;                    // of a row of sums in shared memory
  static constexpr int kSumBytes = 4 * kWarps * kTileRows * kSumStride;
  static constexpr int kMaxExperts = 1024;
  static constexpr int kScheduleOffset = kSumBytes, kTotalBytes = kSumBytes + 4 * kMaxExperts;
};

// Weights are multiplied as 2^-32 of their values: bf16 then holds factors of scales up to 2^33.
constexpr int kMxfp4ScaleOffset = 94, kMxfp4LargestScale = 160;
constexpr float kMxfp4Unit = 4294967296.0f;

// The bf16 pair that scales weights which expand_e2m1 made. scale: its biased exponent.
__device__ __forceinline__ uint32_t mxfp4_factor(uint32_t scale) {
  return (min(scale, static_cast<uint32_t>(kMxfp4LargestScale)) + kMxfp4ScaleOffset) * 0x00800080u;
}

// The eight e2m1 of a word as four pairs (nibbles i and i + 4) of bf16. Sign, exponent and fraction take their places in
// bf16, where they are 2^-126 of the value, subnormal ones included; the factor makes up for that.
__device__ __forceinline__ void expand_e2m1(uint32_t word, uint32_t factor, uint32_t (&pairs)[4]) {
  constexpr uint32_t kMagnitude = 0x01C001C0u, kSign = 0x80008000u;
  pairs[0] = multiply_pair(((word << 6) & kMagnitude) | ((word << 12) & kSign), factor);
  pairs[1] = multiply_pair(((word << 2) & kMagnitude) | ((word << 8) & kSign), factor);
  pairs[2] = multiply_pair(((word >> 2) & kMagnitude) | ((word << 4) & kSign), factor);
  pairs[3] = multiply_pair(((word >> 6) & kMagnitude) | (word & kSign), factor);
}

template <typename SHAPE>
struct GroupedMxfp4Tile {
  static constexpr int kTiles = SHAPE::kTiles, kColumns = SHAPE::kColumns;
  using Sums = float[kTiles][kColumns][4];   // features l / 4 and + 8 of a tile, rows 2 (l % 4) + 0, 1 of a column

  const GroupedGemmParams& p;
  TokenTile rows;
  int first_feature;   // of the expert's
  int warp, lane;

  // sums = the products of this warp's input features, times 2^-32.
  __device__ __forceinline__ void multiply(Sums& sums) const {
    const __nv_bfloat16* x[kColumns];
#pragma unroll
    for (int column = 0; column < kColumns; ++column) x[column] = row_of(column);
#pragma unroll
    for (int i = 0; i < kTiles * kColumns * 4; ++i) sums[i / 4 / kColumns][i / 4 % kColumns][i % 4] = 0.0f;
    const int blocks = (p.in_features + 127) / 128;
    Stage stages[SHAPE::kStages];
#pragma unroll
    for (int i = 0; i < SHAPE::kStages; ++i) load(stages[i], warp + SHAPE::kWarps * i);
#pragma unroll 1
    for (int first = warp; first < blocks; first += SHAPE::kWarps * SHAPE::kStages) {
#pragma unroll
      for (int i = 0; i < SHAPE::kStages; ++i) {
        const int block = first + SHAPE::kWarps * i;
        if (block >= blocks) break;
        multiply_block(stages[i], block, x, sums);
        load(stages[i], block + SHAPE::kWarps * SHAPE::kStages);
      }
    }
  }

 private:
  struct Stage {
    uint4 weights[kTiles][2];
    uint32_t scales[kTiles][2];
  };

  __device__ __forceinline__ int groups() const { return p.in_features / 32; }

  // The lane's row of x of a column of the tile; null: there is none.
  __device__ __forceinline__ const __nv_bfloat16* row_of(int column) const {
    const int row = 8 * column + lane / 4;
    if (row >= rows.num_rows) return nullptr;
    const int64_t place = p.tokens == nullptr ? rows.first_row + row : p.tokens[rows.first_row + row];
    return static_cast<const __nv_bfloat16*>(p.x) + place * p.x_row_stride;
  }

  // Groups beyond the row's end, and their scales, are zero.
  __device__ __forceinline__ void load(Stage& stage, int block) const {
    const int group = 4 * block + lane % 4;
    const bool is_inside = group < groups();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t feature = static_cast<int64_t>(rows.expert) * p.out_features + first_feature + 16 * tile + 8 * half + lane / 4;
        stage.weights[tile][half] = make_uint4(0, 0, 0, 0);
        stage.scales[tile][half] = 0;
        if (is_inside) {
          stage.weights[tile][half] = load_once_16(p.qweight + feature * groups() + group);
          stage.scales[tile][half] = reinterpret_cast<const uint8_t*>(p.group_scales)[feature * groups() + group];
        }
      }
    }
  }

  // Eight input features of the lane's group, in the order of expand_e2m1.
  static __device__ __forceinline__ void load_x(const __nv_bfloat16* from, uint32_t (&pairs)[4]) {
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (from != nullptr) raw = load_global_16(from);
    pairs[0] = __byte_perm(raw.x, raw.z, 0x5410), pairs[1] = __byte_perm(raw.x, raw.z, 0x7632);
    pairs[2] = __byte_perm(raw.y, raw.w, 0x5410), pairs[3] = __byte_perm(raw.y, raw.w, 0x7632);
  }

  __device__ __forceinline__ void multiply_block(const Stage& stage, int block, const __nv_bfloat16* const (&x)[kColumns],
                                                 Sums& sums) const {
    const int group = 4 * block + lane % 4;
    const bool is_inside = group < groups();
    uint32_t pairs[kColumns][4][4];
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        load_x(is_inside && x[column] != nullptr ? x[column] + 32 * group + 8 * word : nullptr, pairs[column][word]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint32_t factors[2] = {mxfp4_factor(stage.scales[tile][0]), mxfp4_factor(stage.scales[tile][1])};
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        uint32_t low[4], high[4];
        expand_e2m1(word_of(stage.weights[tile][0], word), factors[0], low);
        expand_e2m1(word_of(stage.weights[tile][1], word), factors[1], high);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint32_t weights[4] = {low[2 * step], high[2 * step], low[2 * step + 1], high[2 * step + 1]};
#pragma unroll
          for (int column = 0; column < kColumns; ++column) {
            const uint32_t(&row)[4] = pairs[column][word];
            multiply_add<__nv_bfloat16>(sums[tile][column], weights, row[2 * step], row[2 * step + 1]);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ uint32_t word_of(const uint4& weights, int word) {
    return word == 0 ? weights.x : word == 1 ? weights.y : word == 2 ? weights.z : weights.w;
  }
};

// Adds up what the warps have, in their order, and writes the rows.
template <typename SHAPE>
__device__ __forceinline__ void write_grouped_mxfp4(const GroupedGemmParams& p, const TokenTile& rows, int first_feature,
                                                    const float (&sums)[SHAPE::kTiles][SHAPE::kColumns][4], float* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < SHAPE::kTiles; ++tile) {
#pragma unroll
    for (int column = 0; column < SHAPE::kColumns; ++column) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 8 * column + 2 * (lane % 4) + e % 2, feature = 16 * tile + lane / 4 + e / 2 * 8;
        shared[(warp * SHAPE::kTileRows + row) * SHAPE::kSumStride + feature] = sums[tile][column][e];
      }
    }
  }
  __syncthreads();
  constexpr int kPairs = SHAPE::kFeatures / 2;
  for (int item = threadIdx.x; item < SHAPE::kTileRows * kPairs; item += SHAPE::kThreads) {
    const int row = item / kPairs, feature = item % kPairs * 2;
    if (row >= rows.num_rows) break;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int of = 0; of < SHAPE::kWarps; ++of) {
      const float* part = shared + (of * SHAPE::kTileRows + row) * SHAPE::kSumStride + feature;
      sum.x += part[0], sum.y += part[1];
    }
    const int64_t place = static_cast<int64_t>(rows.first_row + row) * p.out_features + first_feature + feature;
    *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.out) + place) =
        pack<__nv_bfloat16>(sum.x * kMxfp4Unit, sum.y * kMxfp4Unit);
  }
}

// One CTA: 32 output features by a tile of tokens; a tile that no expert has is left alone. memory: kTotalBytes.
template <typename SHAPE>
__device__ __forceinline__ void multiply_grouped_mxfp4(const GroupedGemmParams& p, int feature_tile, int token_tile,
                                                       char* memory) {
  int* token_tile_ends = reinterpret_cast<int*>(memory + SHAPE::kScheduleOffset);
  if (threadIdx.x < 32) count_token_tiles(p, SHAPE::kTileRows, token_tile_ends);
  __syncthreads();
  if (token_tile >= token_tile_ends[p.num_experts - 1]) return;
  const TokenTile rows = token_tile_at(p, SHAPE::kTileRows, token_tile_ends, token_tile);
  const int first_feature = feature_tile * SHAPE::kFeatures;
  const GroupedMxfp4Tile<SHAPE> tile{p, rows, first_feature, static_cast<int>(threadIdx.x / 32),
                                     static_cast<int>(threadIdx.x % 32)};
  float sums[SHAPE::kTiles][SHAPE::kColumns][4];
  tile.multiply(sums);
  write_grouped_mxfp4<SHAPE>(p, rows, first_feature, sums, reinterpret_cast<float*>(memory));
}

}  // namespace slipstream
