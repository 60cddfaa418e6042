// Rows of bf16 as pairs of e4m3 numbers, for products with operands of e4m3 (W4A16Pairs): x = scale (first + second / 16).
//
// A bf16 number has 8 significant bits, an e4m3 number 4. scale is a power of two that brings the largest magnitude of a token's
// group to 128..256. Then the remainder of the first number has at most four bits, and the pair is exact while x is at least
// 2^-14 of that magnitude; what is below is at most 2^-14 scale off: 2^-21 of it.
#pragma once

#include <cuda_fp8.h>

#include "formats/numbers.cuh"
#include "params/mixed_gemm_params.h"
#include "ptx/memory_access.cuh"

namespace slipstream {

// The column of a token's first numbers; its second ones follow. Products leave columns 2 (l % 4) + 0, 1 of eight in lane l: so
// that a lane has the two tokens that it writes (MixedGemmWriter), even tokens of eight are in the first of two eights.
template <int COLUMNS>
__device__ __forceinline__ int first_column_of(int token) {
  if constexpr (COLUMNS == 8) return 2 * token;
  return token / 8 * 16 + token % 2 * 8 + token % 8 / 2 * 2;
}

// A power of two, and one over it. magnitudes: the largest bits of elements without their sign, in either half. NaN where one
// of them is, or is infinite.
struct GroupScale {
  float scale, inverse;

  __device__ __forceinline__ explicit GroupScale(uint32_t magnitudes) {
    const uint32_t largest = max(magnitudes >> 16, magnitudes & 0xFFFFu) >> 7, exponent = max(largest, 8u);
    scale = __uint_as_float(largest == 255 ? 0x7FFFFFFFu : (exponent - 7) << 23);
    inverse = __uint_as_float((261 - exponent) << 23);
  }
};

// Four numbers as the bytes of a word, and 16 times what is left of them as those of another.
__device__ __forceinline__ void split_four(const float (&v)[4], uint32_t& first, uint32_t& second) {
  first = second = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 pair = {v[2 * i], v[2 * i + 1]};
    const uint32_t bits = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
    const float2 found = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bits), __NV_E4M3)));
    const float2 rest = {16.0f * (pair.x - found.x), 16.0f * (pair.y - found.y)};
    first |= bits << 16 * i;
    second |= uint32_t{__nv_cvt_float2_to_fp8x2(rest, __NV_SATFINITE, __NV_E4M3)} << 16 * i;
  }
}

constexpr int kSplitThreads = 128;   // of a CTA
constexpr int kSplitFeatures = 8;    // of a thread

// permuted_x[column][32 i + 16 h + 4 t + b]: of feature 32 i + 16 (b / 2) + 4 t + 2 (b % 2) + h of a token, the order in which
// nibbles become operands (W4A16Pairs); and of a token and group of features the sum of x / scale, and the scale, where
// add_group reads them: activation_sums[group][column / 2]. A thread takes features 4 t + 0..3 and 16 further.
template <typename FORMAT, int COLUMNS>
__device__ __forceinline__ void split_rows(const MixedGemmParams& p) {
  constexpr int kThreads = 128 / FORMAT::kGroups / kSplitFeatures;   // of a group, side by side in a warp
  const int of_token = p.in_features / kSplitFeatures, item = blockIdx.x * kSplitThreads + threadIdx.x;
  const bool exists = item < of_token * p.num_tokens;
  const int token = exists ? item / of_token : 0, place = item % of_token, chunk = place / 4, t = place % 4;
  const char* from = static_cast<const char*>(p.x) + token * p.x_row_stride + chunk * 64 + t * 8;
  const uint2 near = load_global_8(from), far = load_global_8(from + 32);
  const uint32_t words[4] = {near.x, near.y, far.x, far.y};
  uint32_t magnitudes = 0;
#pragma unroll
  for (const uint32_t word : words) magnitudes = __vmaxu2(magnitudes, word & 0x7FFF7FFFu);
#pragma unroll
  for (int distance = 1; distance < kThreads; distance *= 2) {
    magnitudes = __vmaxu2(magnitudes, __shfl_xor_sync(~0u, magnitudes, distance));
  }
  const GroupScale group(magnitudes);
  float parts[2][4], sum = 0.0f;   // of even features, and of odd ones
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<__nv_bfloat16>(words[i]);
    parts[0][i] = pair.x * group.inverse, parts[1][i] = pair.y * group.inverse;
    sum += parts[0][i] + parts[1][i];
  }
#pragma unroll
  for (int distance = 1; distance < kThreads; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  if (!exists) return;
  const int column = first_column_of<COLUMNS>(token);
  char* to = static_cast<char*>(p.permuted_x) + int64_t{column} * p.in_features + chunk * 32 + t * 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t first, second;
    split_four(parts[h], first, second);
    *reinterpret_cast<uint32_t*>(to + 16 * h) = first;
    *reinterpret_cast<uint32_t*>(to + 16 * h + p.in_features) = second;
  }
  if (place % kThreads != 0) return;
  reinterpret_cast<float2*>(p.activation_sums)[(place / kThreads * COLUMNS + column) / 2] = {sum, group.scale};
}

}  // namespace slipstream
