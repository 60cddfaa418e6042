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
__device__ __forceinline__ void store_widened(char* row, int column, int row_in_unit, uint4 words, float scale) {
  const uint4 low = widen_latents(words.x, words.y, scale), high = widen_latents(words.z, words.w, scale);
  const bool is_swapped = column / 4 == 1;
  const int part = column % 4 * 2;
  *reinterpret_cast<uint4*>(row + ((part + is_swapped) ^ row_in_unit) * 16) = is_swapped ? high : low;
  *reinterpret_cast<uint4*>(row + ((part + !is_swapped) ^ row_in_unit) * 16) = is_swapped ? low : high;
}

}  // namespace slipstream
