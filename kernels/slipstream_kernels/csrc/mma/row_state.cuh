// Online softmax over a warpgroup's 64 x KEYS scores in the accumulator layout of hopper_mma.cuh: a thread holds parts
// of two rows, and the four lanes of a quad share them.
#pragma once

#include "mma/warp_mma.cuh"

namespace slipstream {

constexpr float kNothing = -__builtin_huge_valf();

// Running maximum (before the factor) and normaliser of a thread's two rows; the normaliser is this thread's part.
struct RowState {
  float maximum[2] = {kNothing, kNothing};
  float normaliser[2] = {0.0f, 0.0f};

  // Turns scores into probabilities; rescale: what sums so far are to be multiplied by.
  template <int N>
  __device__ __forceinline__ void follow(float (&s)[N], const float (&factor)[2], float (&rescale)[2]) {
    float top[2] = {maximum[0], maximum[1]}, shift[2];
    raise(s, top);
    settle(top, factor, rescale, shift);
    exponentiate(s, factor, shift);
  }

  // The largest of a thread's scores and `top`.
  template <int N>
  __device__ __forceinline__ static void raise(const float (&s)[N], float (&top)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 2 * r; i < N; i += 4) top[r] = fmaxf(top[r], fmaxf(s[i], s[i + 1]));
    }
  }

  // From all lanes' largest scores; shift: what exponents of base 2 are lowered by.
  __device__ __forceinline__ void settle(const float (&top)[2], const float (&factor)[2], float (&rescale)[2],
                                         float (&shift)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float old = maximum[r];
      maximum[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
      maximum[r] = fmaxf(maximum[r], __shfl_xor_sync(~0u, maximum[r], 2));
      // A row that has seen no key yet: -inf - -inf would be NaN.
      shift[r] = maximum[r] == kNothing ? 0.0f : maximum[r] * factor[r];
      rescale[r] = exp2_fast(old * factor[r] - shift[r]);
      normaliser[r] *= rescale[r];
    }
  }

  template <int N>
  __device__ __forceinline__ void exponentiate(float (&s)[N], const float (&factor)[2], const float (&shift)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      s[i] = exp2_fast(__fmaf_rn(s[i], factor[i / 2 % 2], -shift[i / 2 % 2]));
      normaliser[i / 2 % 2] += s[i];
    }
  }

  // The row's normaliser; all lanes of the quad take part.
  __device__ __forceinline__ float total(int r) const {
    float sum = normaliser[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return sum;
  }
};

}  // namespace slipstream
