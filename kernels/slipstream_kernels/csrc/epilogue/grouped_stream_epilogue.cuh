// The end of a tile of the streaming grouped GEMM: sums are scaled, gated, transposed and written.
#pragma once

#include "formats/numbers.cuh"
#include "mma/warp_mma.cuh"
#include "schedule/grouped_stream_shape.cuh"

namespace slipstream {

template <typename SHAPE>
struct GroupedStreamEpilogue {
  using T = __nv_bfloat16;

  const GroupedStreamParams& p;
  const GroupedStreamMemory<SHAPE> memory;
  const int warpgroup;
  float weight_scales[SHAPE::kHalves][2], row_scale;

  // Before the tile's products, which hide how long the scales take: gate and up, or two rows of weights; a row of x.
  __device__ __forceinline__ void load_scales(const GroupedTile& tile) {
    if constexpr (SHAPE::kHasRowScales) {
      const float* scales = p.scale + static_cast<int64_t>(tile.expert) * p.out_features;
#pragma unroll
      for (int half = 0; half < SHAPE::kHalves; ++half) {
        const int feature = min(first_feature(tile, half) + static_cast<int>(threadIdx.x % 32 / 4), width() - 1);
        weight_scales[half][0] = __ldg(scales + feature);
        weight_scales[half][1] = __ldg(scales + (SHAPE::kGated ? width() + feature : min(feature + 8, width() - 1)));
      }
      const int row = threadIdx.x % 128;
      if (row < tile.num_rows) {
        const int product_row = tile.first_row + row;
        row_scale = __ldcg(p.x_scale + (p.tokens == nullptr ? product_row : __ldcg(p.tokens + product_row)));
      }
    }
  }

  __device__ __forceinline__ void write(const GroupedTile& tile, float (&sums)[SHAPE::kHalves][SHAPE::kSums]) const {
    if constexpr (SHAPE::kHasRowScales) {
      share_row_scales(tile);
    }
#pragma unroll
    for (int half = 0; half < SHAPE::kHalves; ++half) write_half(tile, half, sums[half]);
  }

 private:
  __device__ __forceinline__ int width() const { return SHAPE::kGated ? p.out_features / 2 : p.out_features; }

  // Of this warp.
  __device__ __forceinline__ int first_feature(const GroupedTile& tile, int half) const {
    const int warp = threadIdx.x % 128 / 32;
    return tile.feature_tile * SHAPE::kFeatures + (half * 4 + warp) * (SHAPE::kFeatures / 8);
  }

  __device__ __forceinline__ void share_row_scales(const GroupedTile& tile) const {
    const int row = threadIdx.x % 128;
    sync_warpgroup();   // the scales of the tile before have been read
    if (row < tile.num_rows) store_shared_4(memory.row_scales(warpgroup) + 4 * row, row_scale);
    sync_warpgroup();
  }

  __device__ __forceinline__ void sync_warpgroup() const { sync_threads(1 + warpgroup, 128); }

  __device__ __forceinline__ void write_half(const GroupedTile& tile, int half, float (&sums)[SHAPE::kSums]) const {
    const int lane = threadIdx.x % 32, feature = first_feature(tile, half);
    T* out = static_cast<T*>(p.out) + static_cast<int64_t>(tile.first_row + lane / 4) * width() + feature;
    const int features = width() - feature;   // that exist
#pragma unroll
    for (int group = 0; group < SHAPE::kColumns / 8; ++group) {
      if (8 * group >= tile.num_rows) break;
      float (&v)[4] = reinterpret_cast<float (&)[4]>(sums[4 * group]);
      if constexpr (SHAPE::kHasRowScales) {
        scale(half, group, v);
      }
      const bool is_row = 8 * group + lane / 4 < tile.num_rows;
      T* row = out + static_cast<int64_t>(8 * group) * width();
      if constexpr (SHAPE::kGated) {
        const uint32_t pair = transpose_8x8(pack<T>(silu(v[0]) * v[2], silu(v[1]) * v[3]));
        if (is_row && features > 0) *reinterpret_cast<uint32_t*>(row + 2 * (lane % 4)) = pair;
      } else {
        write_pairs(row, is_row, features, v);
      }
    }
  }

  __device__ __forceinline__ void scale(int half, int group, float (&v)[4]) const {
    const uint2 scales = load_shared_8(memory.row_scales(warpgroup) + 4 * (8 * group + threadIdx.x % 4 * 2));
    const float of_rows[2] = {__uint_as_float(scales.x), __uint_as_float(scales.y)};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= of_rows[i % 2] * weight_scales[half][i / 2];
  }

  // Of a row of x, lanes have neighbouring outputs 2 q and 2 q + 1 of each eight. Two lanes exchange them, so that each has
  // four of one eight: four lanes write the 32 bytes of a sector at once.
  __device__ __forceinline__ void write_pairs(T* row, bool is_row, int features, const float (&v)[4]) const {
    const uint32_t low = transpose_8x8(pack<T>(v[0], v[1])), high = transpose_8x8(pack<T>(v[2], v[3]));
    const int lane = threadIdx.x % 32;
    const bool is_odd = lane % 2 != 0;
    const uint32_t received = __shfl_xor_sync(~0u, is_odd ? low : high, 1);
    const int first = 8 * (lane % 2) + 4 * (lane % 4 / 2);
    if (is_row && first < features) store_global_8(row + first, is_odd ? received : low, is_odd ? high : received);
  }
};

}  // namespace slipstream
