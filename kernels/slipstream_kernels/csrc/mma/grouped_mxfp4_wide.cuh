// The products of 128 output features of an expert by a tile of its rows, with MXFP4 weights as in
// grouped_mxfp4_multiply.cuh, for more rows: CTAs of few features would read more bytes of x than of weights.
//
// Two teams of four warps divide the blocks of input features. Each warp streams the weights of 32 output features from
// memory to registers; the rows of x of a block come through shared memory, once for the four warps of a team.
#pragma once

#include "mma/grouped_mxfp4_multiply.cuh"
#include "ptx/hopper_copy.cuh"

namespace slipstream {

template <int COLUMNS>
struct WideMxfp4Shape {
  static constexpr int kColumns = COLUMNS, kTileRows = 8 * COLUMNS;
  static constexpr int kTiles = 2, kTeams = 2, kTeamWarps = 4;
  static constexpr int kWarpFeatures = 16 * kTiles, kFeatures = kWarpFeatures * kTeamWarps;   // of a warp, of a CTA
  static constexpr int kTeamThreads = 32 * kTeamWarps, kThreads = kTeams * kTeamThreads;
  static constexpr int kStages = 2;        // blocks of weights of a warp that are on their way
  static constexpr int kCtas = 2;          // of an SM, at once
  static constexpr int kRowStages = 3;     // blocks of rows of a team: one is multiplied, two are on their way
  static constexpr int kStageBytes = 256 * kTileRows, kTeamBytes = kRowStages * kStageBytes;
  static constexpr int kSumStride = kFeatures + 2;
  static constexpr int kSumBytes = 4 * kTeams * kTileRows * kSumStride;   // where the rows of x have been
  static constexpr int kMaxExperts = 1024;
  static constexpr int kScheduleOffset = kTeams * kTeamBytes > kSumBytes ? kTeams * kTeamBytes : kSumBytes;
  static constexpr int kTotalBytes = kScheduleOffset + 4 * kMaxExperts;
};

// The rows of x of a team's blocks: 16 chunks of 8 input features each. Chunks of a row change places, so that the eight
// lanes of a read of 16 bytes (two rows, their four groups) meet different banks.
template <typename SHAPE>
struct Mxfp4Rows {
  static constexpr int kColumns = SHAPE::kColumns;

  const GroupedGemmParams& p;
  const __nv_bfloat16* from[kColumns];   // the chunk that this thread copies, of rows 8 apart
  uint32_t memory;                       // of the team
  int thread;                            // of the team

  __device__ __forceinline__ Mxfp4Rows(const GroupedGemmParams& params, const TokenTile& rows, uint32_t team_memory,
                                       int team_thread)
      : p(params), memory(team_memory), thread(team_thread) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      from[i] = row_of_x(p, rows, 8 * i + thread / 16);
      if (from[i] != nullptr) from[i] += 8 * (thread % 16);
    }
  }

  // Starts the copy of a block; one beyond the last is none. Features beyond the row's end are zero.
  __device__ __forceinline__ void copy(int block, int blocks, int stage) const {
    const int chunk = thread % 16, row = thread / 16;
    const uint32_t to = memory + stage * SHAPE::kStageBytes + 256 * row + 16 * ((chunk & 8) | ((chunk & 7) ^ turn(row, chunk)));
    const bool is_inside = 128 * block + 8 * chunk < p.in_features;
    if (block < blocks) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (from[i] != nullptr) copy_async_or_zero<16>(to + 2048 * i, from[i] + 128 * (is_inside ? block : 0), is_inside);
      }
    }
    commit_copies();
  }

  // A word of each group of the lane's row, of the columns that have rows.
  __device__ __forceinline__ void read(int stage, int word, int num_columns, uint32_t (&pairs)[kColumns][4]) const {
    const int lane = threadIdx.x % 32, row = lane / 4, chunk = 4 * (lane % 4) + word;
    const uint32_t place = 256 * row + 16 * ((chunk & 8) | ((chunk & 7) ^ turn(row, chunk)));
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      if (column >= num_columns) break;
      order_as_e2m1(load_shared_16(memory + stage * SHAPE::kStageBytes + 2048 * column + place), pairs[column]);
    }
  }

 private:
  static __device__ __forceinline__ int turn(int row, int chunk) { return (chunk >> 3) ^ ((row & 1) << 1); }
};

// sums = the products of the team's input features by the warp's output features, times 2^-32. All warps of a team call
// it, also one whose features do not exist.
template <typename SHAPE>
__device__ __forceinline__ void multiply_wide_mxfp4(const GroupedGemmParams& p, const TokenTile& rows, int first_feature,
                                                    uint32_t team_memory, int team,
                                                    float (&sums)[SHAPE::kTiles][SHAPE::kColumns][4]) {
  const bool has_features = first_feature < p.out_features;
  const int num_columns = (rows.num_rows + 7) / 8;
  const int blocks = (p.in_features + 127) / 128;
  const int64_t first_row = static_cast<int64_t>(rows.expert) * p.out_features + (has_features ? first_feature : 0);
  const Mxfp4Rows<SHAPE> x(p, rows, team_memory, threadIdx.x % SHAPE::kTeamThreads);
#pragma unroll
  for (int i = 0; i < SHAPE::kTiles * SHAPE::kColumns * 4; ++i) sums[i / 4 / SHAPE::kColumns][i / 4 % SHAPE::kColumns][i % 4] = 0.0f;
  Mxfp4Stage<SHAPE::kTiles> stages[SHAPE::kStages];
#pragma unroll
  for (int i = 0; i < SHAPE::kStages; ++i) load_mxfp4(p, stages[i], first_row, team + SHAPE::kTeams * i);
#pragma unroll
  for (int i = 0; i < SHAPE::kRowStages - 1; ++i) x.copy(team + SHAPE::kTeams * i, blocks, i);
  int stage = 0;
#pragma unroll 1
  for (int first = team; first < blocks; first += SHAPE::kTeams * SHAPE::kStages) {
#pragma unroll
    for (int i = 0; i < SHAPE::kStages; ++i) {
      const int block = first + SHAPE::kTeams * i;
      if (block >= blocks) break;
      wait_for_copies<SHAPE::kRowStages - 2>();
      sync_threads(1 + team, SHAPE::kTeamThreads);   // all have the block, and none reads the one before it
      x.copy(block + SHAPE::kTeams * (SHAPE::kRowStages - 1), blocks, stage == 0 ? SHAPE::kRowStages - 1 : stage - 1);
      if (has_features) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          uint32_t pairs[SHAPE::kColumns][4];
          x.read(stage, word, num_columns, pairs);
#pragma unroll
          for (int tile = 0; tile < SHAPE::kTiles; ++tile) {
            multiply_mxfp4_word(stages[i], tile, word, pairs, num_columns, sums);
          }
        }
        load_mxfp4(p, stages[i], first_row, block + SHAPE::kTeams * SHAPE::kStages);
      }
      stage = stage + 1 == SHAPE::kRowStages ? 0 : stage + 1;
    }
  }
}

// One CTA: 128 output features by a tile of tokens; a tile that no expert has is left alone. memory: kTotalBytes.
template <int COLUMNS>
__device__ __forceinline__ void multiply_grouped_mxfp4(WideMxfp4Shape<COLUMNS>, const GroupedGemmParams& p,
                                                       int feature_tile, int token_tile, char* memory) {
  using Shape = WideMxfp4Shape<COLUMNS>;
  int* token_tile_ends = reinterpret_cast<int*>(memory + Shape::kScheduleOffset);
  if (threadIdx.x < 32) count_token_tiles(p, Shape::kTileRows, token_tile_ends);
  __syncthreads();
  if (token_tile >= token_tile_ends[p.num_experts - 1]) return;
  const TokenTile rows = token_tile_at(p, Shape::kTileRows, token_tile_ends, token_tile);
  const int warp = threadIdx.x / 32 % Shape::kTeamWarps, team = threadIdx.x / Shape::kTeamThreads;
  const int first_feature = feature_tile * Shape::kFeatures;
  float sums[Shape::kTiles][Shape::kColumns][4];
  multiply_wide_mxfp4<Shape>(p, rows, first_feature + Shape::kWarpFeatures * warp,
                             shared_address(memory) + team * Shape::kTeamBytes, team, sums);
  __syncthreads();   // sums take the place of rows of x
  float* shared = reinterpret_cast<float*>(memory);
  store_mxfp4_sums<Shape>(sums, shared + team * Shape::kTileRows * Shape::kSumStride + Shape::kWarpFeatures * warp);
  __syncthreads();
  write_mxfp4_rows<Shape, Shape::kTeams>(p, rows, first_feature, shared);
}

}  // namespace slipstream
