// The end of a pass: adds the sums of the two blocks of a stage, scales, gates and writes them.
#pragma once

#include "mma/grouped_w4a16_multiply.cuh"

namespace slipstream {

template <typename SHAPE, typename OUT>
struct GroupedW4A16Epilogue {
  const GroupedGemmParams& p;
  float4* exchange;   // shared: sums of the warps that multiply the second block
  int warp, half, lane;

  __device__ __forceinline__ void finish(const Pass& pass, GroupedW4A16Sums<SHAPE>& sums) const {
    const int used = (pass.rows.num_rows + 7) / 8;
    float4* mine = exchange + warp * 32 + lane;
#pragma unroll
    for (int first = 0; first < SHAPE::kWarpTiles; first += SHAPE::kRound) {
      sync_threads(1, 32 * SHAPE::kWarps);   // the sums of the round before have been read
      if (half == 1) store(mine, first, used, sums);
      sync_threads(1, 32 * SHAPE::kWarps);
      if (half == 0) add(mine, first, used, sums);
    }
    if (half == 0) write(pass, used, sums);
  }

 private:
  static constexpr int kStride = 32 * SHAPE::kRowWarps;

  static __device__ __forceinline__ void store(float4* to, int first, int used, const GroupedW4A16Sums<SHAPE>& sums) {
#pragma unroll
    for (int column = 0; column < SHAPE::kColumns; ++column) {
      if (column >= used) break;
#pragma unroll
      for (int i = 0; i < SHAPE::kRound; ++i) {
        const float(&v)[4] = sums.of[first + i][column];
        to[(column * SHAPE::kRound + i) * kStride] = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }

  static __device__ __forceinline__ void add(const float4* from, int first, int used, GroupedW4A16Sums<SHAPE>& sums) {
#pragma unroll
    for (int column = 0; column < SHAPE::kColumns; ++column) {
      if (column >= used) break;
#pragma unroll
      for (int i = 0; i < SHAPE::kRound; ++i) {
        const float4 v = from[(column * SHAPE::kRound + i) * kStride];
        float(&sum)[4] = sums.of[first + i][column];
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
      }
    }
  }

  __device__ __forceinline__ void write(const Pass& pass, int used, GroupedW4A16Sums<SHAPE>& sums) const {
    const int width = p.out_features / SHAPE::kItemTiles;
    const float* channel = p.channel_scale + int64_t{pass.rows.expert} * p.out_features;
#pragma unroll
    for (int i = 0; i < SHAPE::kWarpTiles; i += SHAPE::kItemTiles) {
      const int item = item_of<SHAPE>(warp, i);
      if (item >= pass.num_items) break;
      const int row = (pass.item + item) * 16 + lane / 4;
      float scale[SHAPE::kItemTiles][2];
#pragma unroll
      for (int part = 0; part < SHAPE::kItemTiles; ++part) {
        scale[part][0] = __ldg(channel + part * width + row), scale[part][1] = __ldg(channel + part * width + row + 8);
      }
#pragma unroll
      for (int column = 0; column < SHAPE::kColumns; ++column) {
        if (column >= used) break;
        write_column(pass, column, (pass.item + item) * 16, scale, i, sums);
      }
    }
  }

  // A thread has rows l / 4 and + 8 of the tile, tokens 2 (l % 4) + 0, 1 of the column.
  __device__ __forceinline__ void write_column(const Pass& pass, int column, int first_feature,
                                               const float (&scale)[SHAPE::kItemTiles][2], int i,
                                               const GroupedW4A16Sums<SHAPE>& sums) const {
    const float* token_scale = p.row_scale + pass.token_tile * SHAPE::kTileRows + 8 * column + lane % 4 * 2;
    const float2 tokens = __ldcg(reinterpret_cast<const float2*>(token_scale));
    const int token = 8 * column + lane / 4, width = p.out_features / SHAPE::kItemTiles;
    OUT* out = static_cast<OUT*>(p.out) + int64_t{pass.rows.first_row + token} * width + first_feature + lane % 4 * 2;
#pragma unroll
    for (int part = 0; part < 2; ++part) {   // rows l / 4, rows l / 4 + 8
      float low = sums.of[i][column][2 * part] * tokens.x * scale[0][part];
      float high = sums.of[i][column][2 * part + 1] * tokens.y * scale[0][part];
      if constexpr (SHAPE::kIsGated) {
        low = silu(low) * (sums.of[i + 1][column][2 * part] * tokens.x * scale[1][part]);
        high = silu(high) * (sums.of[i + 1][column][2 * part + 1] * tokens.y * scale[1][part]);
      }
      // Lane l now has token l / 4 and rows 2 (l % 4), + 1.
      const uint32_t pair = transpose_8x8(pack<OUT>(low, high));
      if (token < pass.rows.num_rows) *reinterpret_cast<uint32_t*>(out + 8 * part) = pair;
    }
  }
};

}  // namespace slipstream
