// The end of a pass: adds the sums of warpgroups along K in a fixed order, scales, gates and writes them.
#pragma once

#include "formats/numbers.cuh"
#include "schedule/grouped_w4a8_shape.cuh"
#include "mma/warp_mma.cuh"

namespace slipstream {

template <typename SHAPE, typename OUT, bool IS_GATED>
struct GroupedW4A8Epilogue {
  const GroupedGemmParams& p;
  GroupedW4A8Memory<SHAPE> memory;
  const Pass& pass;
  int index;   // of the pass, among the CTA's
  int width = p.out_features >> IS_GATED, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  OUT* out = static_cast<OUT*>(p.out) + int64_t{pass.rows.first_row} * width;

  // Copies scales to shared memory while weights stream.
  __device__ __forceinline__ void load_scales() const {
    const int tile = warp % SHAPE::kTiles;
    if (lane < 16 && tile < pass.num_items) {
      const int feature = 8 * (pass.item + tile) + lane % 8 + lane / 8 * (p.out_features / 2);
      copy_async<4>(memory.feature_scales(index, warp) + 4 * lane,
                    p.channel_scale + int64_t{pass.rows.expert} * p.out_features + feature);
    }
#pragma unroll
    for (int row = lane; row < SHAPE::kColumns; row += 32) {
      copy_async_or_zero<4>(memory.row_scales(index, warp) + 4 * row, p.row_scale + pass.token_tile * SHAPE::kColumns + row,
                            row < pass.rows.num_rows);
    }
  }

  // sums of column i: features l / 4 and l / 4 + 8 of the warp's tile, rows 8 i + 2 (l % 4) + 0, 1.
  __device__ __forceinline__ void write(const float (&sums)[SHAPE::kSums]) const {
    commit_copies();
    wait_for_copies<0>();
    if constexpr (SHAPE::kWarpgroupsK > 1) return exchange(sums);
    __syncwarp();   // every lane's scales have arrived
    if (warp >= pass.num_items) return;
#pragma unroll
    for (int i = 0; i < SHAPE::kColumns / 8; ++i) {
      if (8 * i < pass.rows.num_rows) {
        write_column(warp, i, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
      }
    }
  }

 private:
  __device__ __forceinline__ void exchange(const float (&sums)[SHAPE::kSums]) const {
    sync_threads(1, SHAPE::kConsumers);   // the sums of the pass before have been read
#pragma unroll
    for (int i = 0; i < SHAPE::kColumns / 8; ++i) {
      asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(memory.exchange(warp, i) + lane * 16), "f"(sums[4 * i]),
                   "f"(sums[4 * i + 1]), "f"(sums[4 * i + 2]), "f"(sums[4 * i + 3]) : "memory");
    }
    sync_threads(1, SHAPE::kConsumers);
    const int items = pass.num_items * ((pass.rows.num_rows + 7) / 8);
#pragma unroll 1
    for (int item = warp; item < items; item += SHAPE::kConsumers / 32) {
      const int tile = item % pass.num_items, column = item / pass.num_items;
      float4 sum = {};
#pragma unroll
      for (int k = 0; k < SHAPE::kWarpgroupsK; ++k) {
        const uint4 v = load_shared_16(memory.exchange(k * SHAPE::kTiles + tile, column) + lane * 16);
        sum.x += __uint_as_float(v.x), sum.y += __uint_as_float(v.y);
        sum.z += __uint_as_float(v.z), sum.w += __uint_as_float(v.w);
      }
      write_column(tile, column, sum);
    }
  }

  // tile: of the pass.
  __device__ __forceinline__ void write_column(int tile, int column, const float4& sum) const {
    const uint2 rows = load_shared_8(memory.row_scales(index, warp) + 4 * (8 * column + 2 * (lane % 4)));
    const float row_scales[2] = {__uint_as_float(rows.x), __uint_as_float(rows.y)};
    const float parts[2][2] = {{sum.x, sum.y}, {sum.z, sum.w}};
    float values[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t scale = load_shared_4(memory.feature_scales(index, tile) + 4 * (lane / 4 + 8 * half));
#pragma unroll
      for (int e = 0; e < 2; ++e) values[half][e] = parts[half][e] * row_scales[e] * __uint_as_float(scale);
    }
    const int first = 8 * (pass.item + tile), row = 8 * column + lane / 4;
    if constexpr (IS_GATED) {
      store(row, first, silu(values[0][0]) * values[1][0], silu(values[0][1]) * values[1][1]);
    } else {
      store(row, first, values[0][0], values[0][1]);
      store(row, first + width / 2, values[1][0], values[1][1]);
    }
  }

  // Transposed: lane l has row l / 4 and features 2 (l % 4), + 1 of the eight.
  __device__ __forceinline__ void store(int row, int first, float low, float high) const {
    const uint32_t pair = transpose_8x8(pack<OUT>(low, high));
    if (row >= pass.rows.num_rows) return;
    *reinterpret_cast<uint32_t*>(out + int64_t{row} * width + first + 2 * (lane % 4)) = pair;
  }
};

}  // namespace slipstream
