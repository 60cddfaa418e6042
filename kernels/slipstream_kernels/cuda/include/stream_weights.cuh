// Weight formats of the streaming product: how 16 bytes of one weight row become operands.
//
// The unit is a span: 64 bytes of a row, 16 for each of the 4 lanes that hold this row of an operand. Its weights fill
// kSteps products of 16; which of them form one product is free as long as the activations are arranged alike, so a
// lane's 16 bytes and its kElements activations are both contiguous in memory.
//
// A format has: Operand; kElements (weights in 16 bytes); kSteps = kElements / 4; kUnit, a factor that the expanded
// operands lack; expand(); arrange(); and Scales, what is multiplied within the sum (none: kIsScaledInside is false).
#pragma once

#include "stream_params.h"
#include "warp_mma.cuh"

namespace slipstream {

struct NoScales {};

// 16-bit weights are operands already.
template <typename T>
struct PlainWeights {
  using Operand = T;
  static constexpr int kElements = 8, kSteps = 2;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kIsScaled = false, kIsScaledInside = false;

  // pairs[step]: this lane's two registers of one row for each product.
  static __device__ __forceinline__ void expand(const uint4& raw, uint32_t (&pairs)[kSteps][2]) {
    pairs[0][0] = raw.x, pairs[0][1] = raw.y, pairs[1][0] = raw.z, pairs[1][1] = raw.w;
  }

  // The same of one token's kElements activations.
  static __device__ __forceinline__ void arrange(const uint4 (&x)[1], uint32_t (&pairs)[kSteps][2]) {
    expand(x[0], pairs);
  }
};

// e4m3, expanded exactly by moving bits: in both formats a number is sign, exponent, fraction with another bias, so
// shifted into place it is too small by a power of two, for subnormals as well. fp16 leaves that factor to the end;
// in bf16 the products would underflow, so it is multiplied in here.
template <typename T>
struct Fp8Weights {
  using Operand = T;
  static constexpr bool kIsHalf = __is_same(T, __half);
  static constexpr int kElements = 16, kSteps = 4;
  static constexpr float kUnit = kIsHalf ? 256.0f : 1.0f;
  static constexpr bool kIsScaled = true, kIsScaledInside = false;

  static __device__ __forceinline__ uint32_t widen(uint32_t high_bytes) {
    constexpr int kShift = kIsHalf ? 1 : 4;
    const uint32_t moved = (high_bytes & 0x7f007f00u) >> kShift;
    const uint32_t pair = moved | (high_bytes & 0x80008000u);
    if constexpr (kIsHalf) {
      return pair;
    } else {
      uint32_t scaled;
      asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(scaled) : "r"(pair), "r"(0x7b807b80u));  // 2^120
      return scaled;
    }
  }

  // Bytes 0 and 2 of a word make one register, 1 and 3 the other.
  static __device__ __forceinline__ void expand(const uint4& raw, uint32_t (&pairs)[kSteps][2]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      pairs[step][0] = widen(words[step] << 8);
      pairs[step][1] = widen(words[step]);
    }
  }

  static __device__ __forceinline__ void arrange(const uint4 (&x)[2], uint32_t (&pairs)[kSteps][2]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint4& half = x[step / 2];
      const uint32_t low = step % 2 ? half.z : half.x, high = step % 2 ? half.w : half.y;
      pairs[step][0] = __byte_perm(low, high, 0x5410);
      pairs[step][1] = __byte_perm(low, high, 0x7632);
    }
  }
};

// e4m3 with one fp32 scale for each block of 128 x 128 weights.
template <typename T>
struct BlockFp8Weights : Fp8Weights<T> {
  static constexpr int kScaleElements = 128;   // of one row under one scale
  static constexpr bool kIsScaled = false, kIsScaledInside = true;

  static __device__ __forceinline__ float load_scale(const StreamParams& p, int row, int column) {
    const float* scales = static_cast<const float*>(p.scale);
    return __ldg(scales + row / 128 * p.scale_row_stride + column / 128);
  }
};

}  // namespace slipstream
