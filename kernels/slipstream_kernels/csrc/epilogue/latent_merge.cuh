// The second kernel of latent attention with few requests: adds up the parts of rows whose keys several CTAs share, by their
// log-sum-exp (Flash-Decoding), in the order of the keys, so that a launch repeats bit for bit. A CTA for each (token, head).
// With many requests the first kernel does it: latent_join.cuh.
#pragma once

#include <cuda_bf16.h>

#include "mma/row_state.cuh"
#include "params/latent_params.h"
#include "ptx/dependent_launch.cuh"
#include "schedule/latent_shape.cuh"

namespace slipstream {

struct LatentMerge {
  using Shape = LatentShape;
  static constexpr int kThreads = Shape::kValueDim / 4;
  static constexpr int kMostParts = 256;
  static constexpr int kBatch = 8;   // parts that are loaded at once

  const LatentParams& p;
  float* weights;    // shared: [kMostParts]
  float* partials;   // shared: [2 x warps], for reductions

  // Of no parts (padding) the sum is zero.
  __device__ __forceinline__ void run(int row_of_q) const {
    if (row_of_q >= p.query_start_loc[p.num_requests] * p.num_heads) return;
    const int2 plan = __ldcg(reinterpret_cast<const int2*>(p.plan) + row_of_q);
    const int num_parts = plan.y / Shape::kRows, row = plan.y % Shape::kRows;
    if (num_parts == 1) return;
    const float inverse = weigh(plan.x, num_parts, row);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int first = 0; first < num_parts; first += kBatch) {
      float4 loaded[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int part = min(first + i, num_parts - 1);
        loaded[i] = __ldcg(reinterpret_cast<const float4*>(p.partial_out) +
                           part_row(p, plan.x, part, row) * (Shape::kValueDim / 4) + threadIdx.x);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float weight = first + i < num_parts ? weights[first + i] : 0.0f;
        sum.x += weight * loaded[i].x, sum.y += weight * loaded[i].y;
        sum.z += weight * loaded[i].z, sum.w += weight * loaded[i].w;
      }
    }
    const uint2 packed = make_uint2(pack<__nv_bfloat16>(sum.x * inverse, sum.y * inverse),
                                    pack<__nv_bfloat16>(sum.z * inverse, sum.w * inverse));
    reinterpret_cast<uint2*>(p.out)[static_cast<int64_t>(row_of_q) * (Shape::kValueDim / 4) + threadIdx.x] = packed;
  }

 private:
  // Fills `weights`; returns the factor of the weighted sum. All threads.
  __device__ __forceinline__ float weigh(int first_slot, int num_parts, int row) const {
    const auto* states = reinterpret_cast<const float2*>(p.partial_state);
    float largest = kNothing, sum = 0.0f;
    for (int part = threadIdx.x; part < num_parts; part += kThreads) {
      largest = fmaxf(largest, __ldcg(states + part_row(p, first_slot, part, row)).x);
    }
    largest = reduce(largest, [](float a, float b) { return fmaxf(a, b); }, partials);
    for (int part = threadIdx.x; part < num_parts; part += kThreads) {
      const float2 state = __ldcg(states + part_row(p, first_slot, part, row));
      const float weight = state.x == kNothing ? 0.0f : exp2_fast(state.x - largest);
      weights[part] = weight;
      sum += weight * state.y;
    }
    sum = reduce(sum, [](float a, float b) { return a + b; }, partials + kThreads / 32);
    return sum == 0.0f ? 0.0f : 1.0f / sum;
  }

  // Over all threads; a barrier, after which `weights` can be read.
  template <typename COMBINE>
  __device__ __forceinline__ float reduce(float value, COMBINE combine, float* of_warps) const {
    for (int distance = 1; distance < 32; distance *= 2) value = combine(value, __shfl_xor_sync(~0u, value, distance));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    float result = of_warps[0];
    for (int warp = 1; warp < kThreads / 32; ++warp) result = combine(result, of_warps[warp]);
    return result;
  }
};

}  // namespace slipstream
