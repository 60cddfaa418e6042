// Online softmax over a warpgroup's 64 x KEYS scores in the accumulator layout of hopper_mma.cuh: a thread holds parts
// of two rows, and the four lanes of a quad share them.
#pragma once

#include "mma/warp_mma.cuh"

namespace slipstream {

constexpr float kNothing = -__builtin_huge_valf();
// How far (base 2) scores may lie above what exponents are lowered by: probabilities of up to 256, which fp16 holds as well.
constexpr float kMostAbove = 8.0f;

// Running maximum (before the factor) and normaliser of a thread's two rows; the normaliser is this thread's part. The
// maximum stays that of an earlier tile while no score lies far above it: most tiles then need neither the other lanes'
// scores nor other sums, and probabilities above 1 have the same relative error. Source: FlashAttention-4's rescaling.
struct RowState {
  float maximum[2] = {kNothing, kNothing};
  float normaliser[2] = {0.0f, 0.0f};

  // Turns scores into probabilities; rescale: what sums so far are to be multiplied by. True if that is not 1 for a row of
  // the warp.
  template <int N>
  __device__ __forceinline__ bool follow(float (&s)[N], const float (&factor)[2], float (&rescale)[2]) {
    float top[2] = {kNothing, kNothing}, shift[2];
    raise(s, top);
    const bool moves = follow_top(top, factor, kMostAbove, rescale, shift);
    exponentiate(s, factor, shift);
    return moves;
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

  // From each thread's own largest scores; shift: what exponents of base 2 are lowered by, which no score exceeds by more
  // than most_above. True if a row of the warp has moved.
  __device__ __forceinline__ bool follow_top(const float (&top)[2], const float (&factor)[2], float most_above,
                                             float (&rescale)[2], float (&shift)[2]) {
    bool is_above = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rescale[r] = 1.0f;
      shift[r] = maximum[r] * factor[r];
      is_above |= maximum[r] == kNothing || top[r] * factor[r] > shift[r] + most_above;
    }
    const bool moves = __any_sync(~0u, is_above);
    if (moves) move(top, factor, most_above, rescale, shift);
    return moves;
  }

  // Rows of which a lane has found such a score, and no others: what a row's sums are does not depend on its company.
  __device__ __forceinline__ void move(const float (&top)[2], const float (&factor)[2], float most_above,
                                       float (&rescale)[2], float (&shift)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float old = maximum[r];
      float largest = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      if (old != kNothing && !(largest * factor[r] > shift[r] + most_above)) continue;
      maximum[r] = largest;
      // A row that has seen no key yet: -inf - -inf would be NaN.
      shift[r] = largest == kNothing ? 0.0f : largest * factor[r];
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
