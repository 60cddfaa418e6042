// The end of a pass: adds the warps' sums through shared memory, scales, biases, gates and writes them.
#pragma once

#include "mma/skinny_gemm_consumer.cuh"
#include "schedule/skinny_gemm_walk.cuh"

namespace slipstream {

template <typename SHAPE>
struct Epilogue {
  using T = typename SHAPE::Operand;
  const SkinnyGemmParams& p;
  float4* exchange;   // shared: [warp][fragment of the round][lane]
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __device__ __forceinline__ void write(const WorkRange& pass, const Sums<SHAPE>& sums) const {
#pragma unroll
    for (int first = 0; first < SHAPE::kFragments; first += SHAPE::kRound) {
      sync_threads(1, 32 * SHAPE::kWarps);   // of the consumers only: what the round before left is read
#pragma unroll
      for (int i = 0; i < SHAPE::kRound; ++i) {
        if (first + i < SHAPE::kFragments) {
          const float(&v)[4] = sums.of[(first + i) / SHAPE::kColumns][(first + i) % SHAPE::kColumns];
          exchange[(warp * SHAPE::kRound + i) * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
        }
      }
      sync_threads(1, 32 * SHAPE::kWarps);
      if (warp < SHAPE::kRound && first + warp < SHAPE::kFragments) finish_fragment(pass, first + warp);
    }
  }

 private:
  __device__ __forceinline__ void finish_fragment(const WorkRange& pass, int fragment) const {
    float sum[4] = {};
#pragma unroll
    for (int source = 0; source < SHAPE::kWarps; ++source) {
      const float4 part = exchange[(source * SHAPE::kRound + fragment % SHAPE::kRound) * 32 + lane];
      sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
    }
    const int tile = fragment / SHAPE::kColumns, token = fragment % SHAPE::kColumns * 8 + lane % 4 * 2;
    const int low = output_of<SHAPE>(pass, tile, 0, lane / 4), high = output_of<SHAPE>(pass, tile, 1, lane / 4);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] = scaled(e < 2 ? low : high, e / 2, pass, sum[e]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (token + e >= p.num_tokens) continue;
      T* out = static_cast<T*>(p.out) + (token + e) * p.out_row_stride;
      if constexpr (SHAPE::kIsGated) {
        if (low < pass.end) out[low] = from_float<T>(silu(sum[e]) * sum[e + 2]);
      } else {
        if (low < pass.end) out[low] = from_float<T>(sum[e]);
        if (high < pass.end) out[high] = from_float<T>(sum[e + 2]);
      }
    }
  }

  __device__ __forceinline__ float scaled(int output, int half, const WorkRange& pass, float sum) const {
    if (output >= pass.end) return 0.0f;
    const int weight = weight_row<SHAPE>(p, output, half);
    if constexpr (SHAPE::Format::kIsScaled) sum *= __ldg(static_cast<const float*>(p.scale) + weight);
    if (p.bias != nullptr) sum += to_float(static_cast<const T*>(p.bias)[weight]);
    return sum;
  }
};

}  // namespace slipstream
