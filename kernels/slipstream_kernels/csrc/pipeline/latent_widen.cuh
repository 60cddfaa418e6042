// FP8 latents to bf16, in the swizzled slabs that the tensor cores read.
#pragma once

#include "mma/warp_mma.cuh"
#include "schedule/latent_shape.cuh"

namespace slipstream {

// How a warpgroup that converts shares out the 64 rows of a part, 128 columns.
struct WidenedPart {
  using Shape = LatentShape;
  static constexpr int kThreads = 128;
  static constexpr int kLanes = Shape::kScaleColumns / 16;   // threads of a row, 16 columns each
  static constexpr int kRowStep = kThreads / kLanes;
  static constexpr int kRounds = Shape::kKeys / kRowStep;
};

// Four e4m3 numbers, their bits in the place of bf16's: each times 2^-120, subnormal ones too. NaN becomes a number.
__device__ __forceinline__ uint2 lay_out_e4m3(uint32_t word) {
  const auto lay_out = [](uint32_t high_bytes) { return (high_bytes & 0x80008000u) | (high_bytes >> 4 & 0x07f007f0u); };
  return make_uint2(lay_out(__byte_perm(word, 0, 0x1404)), lay_out(__byte_perm(word, 0, 0x3424)));
}

__device__ __forceinline__ uint4 lay_out_latents(uint32_t first, uint32_t second) {
  const uint2 low = lay_out_e4m3(first), high = lay_out_e4m3(second);
  return make_uint4(low.x, low.y, high.x, high.y);
}

__device__ __forceinline__ uint4 widen_latents(uint32_t first, uint32_t second, float scale) {
  uint32_t pairs[4];
  widen_e4m3(first, pairs[0], pairs[1]);
  widen_e4m3(second, pairs[2], pairs[3]);
#pragma unroll
  for (uint32_t& pair : pairs) {
    const float2 values = unpack<__half>(pair);
    pair = pack<__nv_bfloat16>(values.x * scale, values.y * scale);
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// 16 columns of a row: two swizzled parts of 16 bytes. The threads of a row's second slab begin with the other one, so
// that eight neighbouring threads write to different banks.
__device__ __forceinline__ void store_columns(char* row, int column, int row_in_unit, uint4 low, uint4 high) {
  const bool is_swapped = column / 4 == 1;
  const int part = column % 4 * 2;
  *reinterpret_cast<uint4*>(row + ((part + is_swapped) ^ row_in_unit) * 16) = is_swapped ? high : low;
  *reinterpret_cast<uint4*>(row + ((part + !is_swapped) ^ row_in_unit) * 16) = is_swapped ? low : high;
}

__device__ __forceinline__ void store_widened(char* row, int column, int row_in_unit, uint4 words, float scale) {
  store_columns(row, column, row_in_unit, widen_latents(words.x, words.y, scale), widen_latents(words.z, words.w, scale));
}

}  // namespace slipstream
