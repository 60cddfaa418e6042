// A warpgroup's 64 x 256 sums of latent attention: to `out`, or as a part of rows whose keys several CTAs share.
#pragma once

#include <cuda_bf16.h>

#include "epilogue/quad_transpose.cuh"
#include "mma/row_state.cuh"
#include "schedule/latent_shape.cuh"
#include "schedule/latent_work.cuh"

namespace slipstream {

struct LatentStore {
  using Shape = LatentShape;
  static constexpr int kOutputs = Shape::kValueDim / 4;

  const LatentParams& p;
  const LatentWork& work;
  int first_column;

  // All threads of the warpgroup.  sums: of the two rows' probabilities.
  __device__ __forceinline__ void run(const RowState& state, const float (&sums)[2], const float (&out)[kOutputs]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
      const bool is_row = work.first_row + row < num_rows();
      if (work.num_parts == 1) {
        const int64_t to_row = static_cast<int64_t>(work.start) * p.num_heads + work.first_row + row;
        __nv_bfloat16* to = static_cast<__nv_bfloat16*>(p.out) + to_row * Shape::kValueDim + first_column;
        store_row<2 * kOutputs>(to, is_row, out, r, sums[r] == 0.0f ? 0.0f : 1.0f / sums[r]);
      } else if (is_row) {
        leave_part(static_cast<int64_t>(work.slot) * Shape::kRows + row, r, state, sums[r], out);
      }
    }
  }

 private:
  __device__ __forceinline__ int num_rows() const { return work.query_len * p.num_heads; }

  __device__ __forceinline__ void leave_part(int64_t part_row, int r, const RowState& state, float sum,
                                             const float (&out)[kOutputs]) const {
    const int lane = threadIdx.x % 4;
    float* to = p.partial_out + part_row * Shape::kValueDim + first_column + 2 * lane;
#pragma unroll
    for (int i = 2 * r; i < kOutputs; i += 4) __stcg(reinterpret_cast<float2*>(to + 2 * (i - 2 * r)), make_float2(out[i], out[i + 1]));
    if (first_column == 0 && lane == 0) {
      const float maximum = state.maximum[r] == kNothing ? kNothing : state.maximum[r] * p.scale * kLog2E;
      __stcg(reinterpret_cast<float2*>(p.partial_state) + part_row, make_float2(maximum, sum));
    }
  }
};

}  // namespace slipstream
