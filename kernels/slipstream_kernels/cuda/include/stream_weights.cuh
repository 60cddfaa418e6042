// Weight formats of the streaming product: how 16 bytes of one weight row become operands.
//
// The unit is a span: 64 bytes of a row, 16 for each of the 4 lanes that hold this row of an operand. Its weights fill
// kSteps products of 16; which of them form one product is free as long as the activations are arranged alike, so a
// lane's 16 bytes and its kElements activations are both contiguous in memory.
//
// A format has: Operand; kElements (weights in 16 bytes); kSteps = kElements / 4; kGroupSpans, how many spans are
// multiplied at once; kUnit, a factor that the products lack; expand(); arrange(); kIsScaled: by one fp32 number per
// row, at the end; kIsScaledInside: by load_scale(), one per row and group of spans.
#pragma once

#include "stream_params.h"
#include "warp_mma.cuh"

namespace slipstream {

// 16-bit weights are operands already.
template <typename T>
struct PlainWeights {
  using Operand = T;
  static constexpr int kElements = 8, kSteps = 2, kGroupSpans = 2;
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
// shifted into place it is too small by a power of two, also if it is subnormal: 2^-8 in fp16, 2^-120 in bf16. There
// the activations are enlarged by 2^60, so that sums stay far from both ends of fp32. The rest is left to the end.
template <typename T>
struct Fp8Weights {
  using Operand = T;
  static constexpr bool kIsHalf = __is_same(T, __half);
  static constexpr int kElements = 16, kSteps = 4, kGroupSpans = 2;
  static constexpr float kUnit = kIsHalf ? 0x1p8f : 0x1p60f;
  static constexpr bool kIsScaled = true, kIsScaledInside = false;

  // Bytes 0 and 2 of a word make one register, 1 and 3 the other.
  static __device__ __forceinline__ void expand(const uint4& raw, uint32_t (&pairs)[kSteps][2]) {
    constexpr int kShift = kIsHalf ? 1 : 4;
    constexpr uint32_t kMask = 0x7f007f00u >> kShift;
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t word = words[step];
      pairs[step][0] = (word << (8 - kShift) & kMask) | (word << 8 & 0x80008000u);
      pairs[step][1] = (word >> kShift & kMask) | (word & 0x80008000u);
    }
  }

  static __device__ __forceinline__ void arrange(const uint4 (&x)[2], uint32_t (&pairs)[kSteps][2]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint4& half = x[step / 2];
      const uint32_t low = step % 2 ? half.z : half.x, high = step % 2 ? half.w : half.y;
      pairs[step][0] = enlarge(__byte_perm(low, high, 0x5410));
      pairs[step][1] = enlarge(__byte_perm(low, high, 0x7632));
    }
  }

 private:
  static __device__ __forceinline__ uint32_t enlarge(uint32_t pair) {
    if constexpr (kIsHalf) return pair;
    uint32_t enlarged;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(enlarged) : "r"(pair), "r"(0x5d805d80u));  // 2^60
    return enlarged;
  }
};

// e4m3 with one fp32 scale for each block of 128 x 128 weights: two spans of a row.
template <typename T>
struct BlockFp8Weights : Fp8Weights<T> {
  static constexpr bool kIsScaled = false, kIsScaledInside = true;

  static __device__ __forceinline__ float load_scale(const StreamParams& p, int row, int column) {
    const float* scales = static_cast<const float*>(p.scale);
    return __ldg(scales + row / 128 * p.scale_row_stride + column / 128);
  }
};

}  // namespace slipstream
