// 4-bit weights as the tensor cores' registers want them beside e4m3 tokens: what lies in a strip of 16 output features x 128
// input features, and how a lane makes its operands of it. Their order is that of slipstream_kernels/w4a8_layout.py.
// Device code only; no framework header.
#pragma once

#include <cuda_fp8.h>

#include "formats/int4_codec.cuh"

namespace slipstream {

// A row's scale, and what is added to sums before: scale * (sum + bias * total of activations).
struct RowScale {
  float scale, bias;
};

// A phase is two products of 32 input features; a lane has its 16 bytes side by side. A nibble in the low bits of e4m3 is
// code / 512, exactly: three instructions for eight codes; a zero point is a multiple of the activations' sum. A word is
// fp16 512 * scale of a row and group, and fp16 -zero / 512 above it.
template <int GROUPS>
struct W4a8Codes {
  static constexpr int kPhases = 2, kGroups = GROUPS, kCodeBytes = 1024, kWordBytes = 64 * GROUPS;
  uint4 raw[kPhases];

  __device__ __forceinline__ void load(uint32_t codes, int lane) {
#pragma unroll
    for (int i = 0; i < kPhases; ++i) raw[i] = load_shared_16(codes + 512 * i + 16 * lane);
  }

  __device__ __forceinline__ void expand(int phase, uint32_t (&a)[8]) const {
    split(raw[phase].x, a[0], a[2]), split(raw[phase].y, a[1], a[3]);
    split(raw[phase].z, a[4], a[6]), split(raw[phase].w, a[5], a[7]);
  }

  static __device__ __forceinline__ RowScale row_scale(uint32_t word) {
    return {scale_of(word), scale_of(word >> 16)};
  }

 private:
  static __device__ __forceinline__ void split(uint32_t word, uint32_t& low, uint32_t& high) {
    low = word & 0x0F0F0F0Fu, high = word >> 4 & 0x0F0F0F0Fu;
  }
};

}  // namespace slipstream
