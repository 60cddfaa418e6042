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
// bf16, where they are 2^-126 of the value, subnormal ones included; the factor makes up for that. A product by two
// powers of two moves both parts at once: the units of shifts and masks are what limits few rows.
__device__ __forceinline__ void expand_e2m1(uint32_t word, uint32_t factor, uint32_t (&pairs)[4]) {
  constexpr uint32_t kPlaces = 0x81C081C0u, kEven = 0x000F000Fu, kOdd = 0x00F000F0u;
  constexpr uint32_t kMoveEven = (1u << 6) + (1u << 12), kMoveOdd = (1u << 2) + (1u << 8);
  const uint32_t upper = word >> 8;
  pairs[0] = multiply_pair(((word & kEven) * kMoveEven) & kPlaces, factor);
  pairs[1] = multiply_pair(((word & kOdd) * kMoveOdd) & kPlaces, factor);
  pairs[2] = multiply_pair(((upper & kEven) * kMoveEven) & kPlaces, factor);
  pairs[3] = multiply_pair(((upper & kOdd) * kMoveOdd) & kPlaces, factor);
}

// Weights of a block on their way to a lane, by tiles of 16 output features and their halves.
template <int TILES>
struct Mxfp4Stage {
  uint4 weights[TILES][2];
  uint32_t scales[TILES][2];
};

// Groups beyond the row's end, and their scales, are zero. first_row: of the warp's output features, of all experts'.
template <int TILES>
__device__ __forceinline__ void load_mxfp4(const GroupedGemmParams& p, Mxfp4Stage<TILES>& stage, int64_t first_row,
                                           int block) {
  const int lane = threadIdx.x % 32, groups = p.in_features / 32, group = 4 * block + lane % 4;
  const bool is_inside = group < groups;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t place = (first_row + 16 * tile + 8 * half + lane / 4) * groups + group;
      stage.weights[tile][half] = make_uint4(0, 0, 0, 0);
      stage.scales[tile][half] = 0;
      if (is_inside) {
        stage.weights[tile][half] = load_once_16(p.qweight + place);
        stage.scales[tile][half] = reinterpret_cast<const uint8_t*>(p.group_scales)[place];
      }
    }
  }
}

__device__ __forceinline__ uint32_t word_of(const uint4& weights, int word) {
  return word == 0 ? weights.x : word == 1 ? weights.y : word == 2 ? weights.z : weights.w;
}

// Eight input features of a row, in the order of expand_e2m1.
__device__ __forceinline__ void order_as_e2m1(const uint4& raw, uint32_t (&pairs)[4]) {
  pairs[0] = __byte_perm(raw.x, raw.z, 0x5410), pairs[1] = __byte_perm(raw.x, raw.z, 0x7632);
  pairs[2] = __byte_perm(raw.y, raw.w, 0x5410), pairs[3] = __byte_perm(raw.y, raw.w, 0x7632);
}

// sums += a word of a tile's weights by the same input features of the rows: pairs, of each column.
// num_columns: those that have rows.
template <int TILES, int COLUMNS>
__device__ __forceinline__ void multiply_mxfp4_word(const Mxfp4Stage<TILES>& stage, int tile, int word,
                                                    const uint32_t (&pairs)[COLUMNS][4], int num_columns,
                                                    float (&sums)[TILES][COLUMNS][4]) {
  uint32_t low[4], high[4];
  expand_e2m1(word_of(stage.weights[tile][0], word), mxfp4_factor(stage.scales[tile][0]), low);
  expand_e2m1(word_of(stage.weights[tile][1], word), mxfp4_factor(stage.scales[tile][1]), high);
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const uint32_t weights[4] = {low[2 * step], high[2 * step], low[2 * step + 1], high[2 * step + 1]};
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
      if (column >= num_columns) break;
      multiply_add<__nv_bfloat16>(sums[tile][column], weights, pairs[column][2 * step], pairs[column][2 * step + 1]);
    }
  }
}

// The row of x that a row of the tile takes; null: there is none.
__device__ __forceinline__ const __nv_bfloat16* row_of_x(const GroupedGemmParams& p, const TokenTile& rows, int row) {
  if (row >= rows.num_rows) return nullptr;
  const int64_t place = p.tokens == nullptr ? rows.first_row + row : p.tokens[rows.first_row + row];
  return static_cast<const __nv_bfloat16*>(p.x) + place * p.x_row_stride;
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
    for (int column = 0; column < kColumns; ++column) x[column] = row_of_x(p, rows, 8 * column + lane / 4);
#pragma unroll
    for (int i = 0; i < kTiles * kColumns * 4; ++i) sums[i / 4 / kColumns][i / 4 % kColumns][i % 4] = 0.0f;
    const int blocks = (p.in_features + 127) / 128;
    const int64_t first_row = static_cast<int64_t>(rows.expert) * p.out_features + first_feature;
    Mxfp4Stage<kTiles> stages[SHAPE::kStages];
#pragma unroll
    for (int i = 0; i < SHAPE::kStages; ++i) load_mxfp4(p, stages[i], first_row, warp + SHAPE::kWarps * i);
#pragma unroll 1
    for (int first = warp; first < blocks; first += SHAPE::kWarps * SHAPE::kStages) {
#pragma unroll
      for (int i = 0; i < SHAPE::kStages; ++i) {
        const int block = first + SHAPE::kWarps * i;
        if (block >= blocks) break;
        multiply_block(stages[i], block, x, sums);
        load_mxfp4(p, stages[i], first_row, block + SHAPE::kWarps * SHAPE::kStages);
      }
    }
  }

 private:
  __device__ __forceinline__ void multiply_block(const Mxfp4Stage<kTiles>& stage, int block,
                                                 const __nv_bfloat16* const (&x)[kColumns], Sums& sums) const {
    const int group = 4 * block + lane % 4;
    const bool is_inside = group < p.in_features / 32;
    uint32_t pairs[4][kColumns][4];
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (is_inside && x[column] != nullptr) raw = load_global_16(x[column] + 32 * group + 8 * word);
        order_as_e2m1(raw, pairs[word][column]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int word = 0; word < 4; ++word) multiply_mxfp4_word(stage, tile, word, pairs[word], kColumns, sums);
    }
  }
};

// Stores what a warp has, from its first feature on.
template <typename SHAPE>
__device__ __forceinline__ void store_mxfp4_sums(const float (&sums)[SHAPE::kTiles][SHAPE::kColumns][4], float* shared) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < SHAPE::kTiles; ++tile) {
#pragma unroll
    for (int column = 0; column < SHAPE::kColumns; ++column) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 8 * column + 2 * (lane % 4) + e % 2, feature = 16 * tile + lane / 4 + e / 2 * 8;
        shared[row * SHAPE::kSumStride + feature] = sums[tile][column][e];
      }
    }
  }
}

// Adds up what PARTS of the input features gave, in their order, and writes the rows.
template <typename SHAPE, int PARTS>
__device__ __forceinline__ void write_mxfp4_rows(const GroupedGemmParams& p, const TokenTile& rows, int first_feature,
                                                 const float* shared) {
  constexpr int kPairs = SHAPE::kFeatures / 2;
  for (int item = threadIdx.x; item < SHAPE::kTileRows * kPairs; item += SHAPE::kThreads) {
    const int row = item / kPairs, feature = item % kPairs * 2;
    if (row >= rows.num_rows) break;
    if (first_feature + feature >= p.out_features) continue;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int of = 0; of < PARTS; ++of) {
      const float* part = shared + (of * SHAPE::kTileRows + row) * SHAPE::kSumStride + feature;
      sum.x += part[0], sum.y += part[1];
    }
    const int64_t place = static_cast<int64_t>(rows.first_row + row) * p.out_features + first_feature + feature;
    *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.out) + place) =
        pack<__nv_bfloat16>(sum.x * kMxfp4Unit, sum.y * kMxfp4Unit);
  }
}

// One CTA: 32 output features by a tile of tokens; a tile that no expert has is left alone. memory: kTotalBytes.
template <int COLUMNS>
__device__ __forceinline__ void multiply_grouped_mxfp4(GroupedMxfp4Shape<COLUMNS>, const GroupedGemmParams& p,
                                                       int feature_tile, int token_tile, char* memory) {
  using Shape = GroupedMxfp4Shape<COLUMNS>;
  int* token_tile_ends = reinterpret_cast<int*>(memory + Shape::kScheduleOffset);
  if (threadIdx.x < 32) count_token_tiles(p, Shape::kTileRows, token_tile_ends);
  __syncthreads();
  if (token_tile >= token_tile_ends[p.num_experts - 1]) return;
  const TokenTile rows = token_tile_at(p, Shape::kTileRows, token_tile_ends, token_tile);
  const int first_feature = feature_tile * Shape::kFeatures, warp = threadIdx.x / 32;
  const GroupedMxfp4Tile<Shape> tile{p, rows, first_feature, warp, static_cast<int>(threadIdx.x % 32)};
  float sums[Shape::kTiles][Shape::kColumns][4];
  tile.multiply(sums);
  float* shared = reinterpret_cast<float*>(memory);
  store_mxfp4_sums<Shape>(sums, shared + warp * Shape::kTileRows * Shape::kSumStride);
  __syncthreads();
  write_mxfp4_rows<Shape, Shape::kWarps>(p, rows, first_feature, shared);
}

}  // namespace slipstream
