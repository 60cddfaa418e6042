// Sums of a group of input features that leave the tensor cores for fp32, where scale and zero point are applied.
#pragma once

#include "schedule/mixed_gemm_shape.cuh"

namespace slipstream {

// What the sums of a lane's columns are scaled with: of each token the sum of its activations; in pairs, its scale behind it.
template <typename SHAPE>
struct GroupTokens {
  static constexpr int kCount = SHAPE::kParts / 4;
  uint2 of_columns[kCount];

  // from: the lane's address in the block's activation sums.
  __device__ __forceinline__ void load(uint32_t from) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) of_columns[i] = load_shared_8(from + 32 * i);
  }
};

// sums += scale * (parts + bias * sums of activations), for rows l / 4 and l / 4 + 8.
template <typename SHAPE>
__device__ __forceinline__ void add_group(const uint32_t (&words)[2], const GroupTokens<SHAPE>& tokens,
                                          const float (&parts)[SHAPE::kParts], float (&sums)[SHAPE::kSums]) {
  const RowScale rows[2] = {SHAPE::Format::row_scale(words[0]), SHAPE::Format::row_scale(words[1])};
#pragma unroll
  for (int i = 0; i < SHAPE::kParts / 4; ++i) {
    const float first = __uint_as_float(tokens.of_columns[i].x), second = __uint_as_float(tokens.of_columns[i].y);
    if constexpr (!SHAPE::kIsInPairs) {
      const float of_tokens[2] = {first, second};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const RowScale& row = rows[e / 2];
        sums[4 * i + e] += row.scale * (parts[4 * i + e] + row.bias * of_tokens[e % 2]);
      }
    } else {
      // A token's second column has 16 times what it stands for; its scale follows its sum.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float part = parts[4 * i + 2 * half] + 1.0f / 16 * parts[4 * i + 2 * half + 1];
        sums[i / 2 * 4 + 2 * half + i % 2] += rows[half].scale * second * (part + rows[half].bias * first);
      }
    }
  }
}

}  // namespace slipstream
