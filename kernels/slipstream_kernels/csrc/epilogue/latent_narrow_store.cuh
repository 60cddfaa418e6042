// A warpgroup's 256 columns of the sums of latent attention with few rows: to `out`, or as a part of rows whose keys
// several CTAs share. A thread holds them as latent_narrow_consumer.cuh does, columns by rows.
#pragma once

#include <cuda_bf16.h>

#include "epilogue/latent_narrow_join.cuh"
#include "mma/row_state.cuh"
#include "schedule/latent_shape.cuh"
#include "schedule/latent_work.cuh"

namespace slipstream {

template <int W>
struct NarrowStore {
  using Shape = LatentShape;
  static constexpr int kRows = Shape::kRows;
  static constexpr int kSlabs = Shape::kValueSlabs / 2;

  const LatentParams& p;
  const LatentWork& work;

  // maxima (base 2), sums: of the thread's rows.  flag: see has_left_last.  All threads of both warpgroups.
  __device__ __forceinline__ void run(float (*out)[kRows / 2], const float (&maxima)[kRows / 4], float (&sums)[kRows / 4],
                                      uint32_t flag) const {
    if (work.num_parts > 1 && p.arrivals == nullptr) return leave_part(out, maxima, sums);
    if (work.num_parts > 1) {
      auto& all = reinterpret_cast<float(&)[kSlabs * kRows / 2]>(out[0][0]);
      const NarrowParts<kSlabs * kRows / 2, kRows / 4, NarrowStore> parts{
          p, work, static_cast<int>(threadIdx.x % 128) + 128 * W};
      parts.leave(all, maxima, sums, W == 0 && threadIdx.x % 128 < 4);
      if (!has_left_last(p, work, parts.thread, flag)) return;
      parts.add_up(all, sums);
    }
    store_rows(out, sums);
  }

  static __device__ __forceinline__ int row_of(int h) { return 8 * (h / 2) + lane() % 4 * 2 + h % 2; }
  static constexpr __device__ int mine(int i) { return i % (kRows / 2) / 4 * 2 + i % 2; }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ int num_rows() const { return min(work.query_len * p.num_heads - work.first_row, kRows); }
  // Of the 16 columns of a slab that the warp has, the first.
  __device__ __forceinline__ int first_column(int slab) const {
    return 256 * W + 64 * slab + threadIdx.x % 128 / 32 * 16;
  }

  __device__ __forceinline__ void store_rows(const float (*out)[kRows / 2], const float (&sums)[kRows / 4]) const {
    float inverse[kRows / 4];
#pragma unroll
    for (int h = 0; h < kRows / 4; ++h) inverse[h] = sums[h] == 0.0f ? 0.0f : 1.0f / sums[h];
    const int64_t first_row = static_cast<int64_t>(work.start) * p.num_heads + work.first_row;
#pragma unroll
    for (int group = 0; group < kRows / 8; ++group) {
      const int row = 8 * group + lane() / 4;
      __nv_bfloat16* to = static_cast<__nv_bfloat16*>(p.out) + (first_row + row) * Shape::kValueDim + lane() % 4 * 2;
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* pair = out[slab] + 4 * group + 2 * r;
          const uint32_t rows = pack<__nv_bfloat16>(pair[0] * inverse[2 * group], pair[1] * inverse[2 * group + 1]);
          const uint32_t columns = transpose_8x8(rows);   // two columns of one row, instead of one of two
          if (row < num_rows()) *reinterpret_cast<uint32_t*>(to + first_column(slab) + 8 * r) = columns;
        }
      }
    }
  }

  __device__ __forceinline__ void leave_part(const float (*out)[kRows / 2], const float (&maxima)[kRows / 4],
                                             const float (&sums)[kRows / 4]) const {
#pragma unroll
    for (int h = 0; h < kRows / 4; ++h) {
      const int row = row_of(h);
      if (row >= num_rows()) continue;
      const int64_t part_row = static_cast<int64_t>(work.slot) * kRows + row;
      float* to = p.partial_out + part_row * Shape::kValueDim + lane() / 4;
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
        for (int r = 0; r < 2; ++r) __stcg(to + first_column(slab) + 8 * r, out[slab][h / 2 * 4 + 2 * r + h % 2]);
      }
      if (W == 0 && threadIdx.x % 128 < 4) {
        __stcg(reinterpret_cast<float2*>(p.partial_state) + part_row, make_float2(maxima[h], sums[h]));
      }
    }
  }
};

}  // namespace slipstream
