// MXFP4 codes in the order of grouped_mxfp4_layout.py as pairs of bf16.
#pragma once

#include "formats/numbers.cuh"

namespace slipstream {

// Weights are multiplied as 2^-32 of their values: bf16 then holds factors of scales up to 2^33.
constexpr float kMxfp4Unit = 4294967296.0f;

// The bf16 pair that scales weights which expand_e2m1 made to 2^-32 of their values, of a byte of a word: its biased
// exponent.
__device__ __forceinline__ uint32_t mxfp4_factor(uint32_t scales, int byte) {
  return __byte_perm(scales, 0, 0x4040 + 0x0101 * byte) << 7;
}

// The eight e2m1 of a word as four pairs of bf16, of neighbouring input features. Sign, exponent and fraction take their
// places in bf16, where they are 2^-126 of the value, subnormal ones included; the factor makes up for that. Shifts to the
// left are products: the units of masks and shifts to the right are the busier ones. The bits of the last pair fill gaps
// of the others, and a product by three powers of two brings them to their places.
__device__ __forceinline__ void expand_e2m1(uint32_t word, uint32_t factor, uint32_t (&pairs)[4]) {
  constexpr uint32_t kPlaces = 0x81C081C0u, kGaps = 0x00D800D8u, kMoves = 1u + (1u << 5) + (1u << 11);
  pairs[0] = multiply_pair(word & kPlaces, factor);
  pairs[1] = multiply_pair((word * 8) & kPlaces, factor);
  pairs[2] = multiply_pair((word * 64) & kPlaces, factor);
  pairs[3] = multiply_pair((((word >> 7) & kGaps) * kMoves) & kPlaces, factor);
}

}  // namespace slipstream
