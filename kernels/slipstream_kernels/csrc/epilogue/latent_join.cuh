// Adds up the parts of rows whose keys several CTAs share, by their log-sum-exp (Flash-Decoding), in the CTA that leaves the
// last of them: with many requests a unit has few parts, and those that are there early wait for no second kernel. In the
// order of the keys, whoever is last, so that a launch repeats bit for bit. Few requests have many parts: latent_merge.cuh.
// For few rows: latent_narrow_join.cuh.
#pragma once

#include <cuda_bf16.h>

#include "epilogue/latent_parts.cuh"
#include "mma/row_state.cuh"
#include "schedule/latent_shape.cuh"
#include "schedule/latent_work.cuh"

namespace slipstream {

struct LatentJoin {
  using Shape = LatentShape;
  static constexpr int kThreads = kPartThreads;
  static constexpr int kBatch = 8;                           // rows that a thread loads at once
  static constexpr int kRowThreads = Shape::kValueDim / 4;   // of a row, four columns each

  const LatentParams& p;
  const LatentWork work;
  int thread;       // of both warpgroups that multiply
  uint32_t flag;    // a word of shared memory

  // All threads, which have left their part.
  __device__ __forceinline__ void run() const {
    if (!has_left_last(p, work, thread, flag)) return;
#pragma unroll 1
    for (int row = thread / kRowThreads; row < num_rows(); row += kThreads / kRowThreads * kBatch) add_up(row);
  }

 private:
  __device__ __forceinline__ int num_rows() const {
    return min(work.query_len * p.num_heads - work.first_row, Shape::kRows);
  }
  __device__ __forceinline__ int row_of(int first_row, int i) const {
    return min(first_row + i * (kThreads / kRowThreads), num_rows() - 1);
  }

  __device__ __forceinline__ void add_up(int first_row) const {
    float4 sum[kBatch];
    float largest[kBatch], total[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) sum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f), largest[i] = kNothing, total[i] = 0.0f;
#pragma unroll 1
    for (int part = 0; part < work.num_parts; ++part) {
      float4 values[kBatch];
      float2 states[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t row = part_row(p, work.first_slot, part, row_of(first_row, i));
        states[i] = __ldcg(reinterpret_cast<const float2*>(p.partial_state) + row);
        values[i] = __ldcg(reinterpret_cast<const float4*>(p.partial_out) + row * kRowThreads + thread % kRowThreads);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float old = largest[i];
        largest[i] = fmaxf(old, states[i].x);
        // A part or all so far have seen no key: -inf - -inf would be NaN.
        const float keep = old == kNothing ? 0.0f : exp2_fast(old - largest[i]);
        const float weight = states[i].x == kNothing ? 0.0f : exp2_fast(states[i].x - largest[i]);
        total[i] = total[i] * keep + states[i].y * weight;
        sum[i].x = sum[i].x * keep + values[i].x * weight, sum[i].y = sum[i].y * keep + values[i].y * weight;
        sum[i].z = sum[i].z * keep + values[i].z * weight, sum[i].w = sum[i].w * keep + values[i].w * weight;
      }
    }
    uint2* out = reinterpret_cast<uint2*>(p.out) +
                 (static_cast<int64_t>(work.start) * p.num_heads + work.first_row) * kRowThreads + thread % kRowThreads;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first_row + i * (kThreads / kRowThreads);
      const float inverse = total[i] == 0.0f ? 0.0f : 1.0f / total[i];
      if (row < num_rows()) {
        out[row * kRowThreads] = make_uint2(pack<__nv_bfloat16>(sum[i].x * inverse, sum[i].y * inverse),
                                            pack<__nv_bfloat16>(sum[i].z * inverse, sum[i].w * inverse));
      }
    }
  }
};

}  // namespace slipstream
