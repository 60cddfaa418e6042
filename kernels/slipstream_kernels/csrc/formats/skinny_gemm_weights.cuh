// Weight formats of the skinny GEMM: how 16 bytes of one weight row become operands.
//
// A span is 64 bytes of a row, 16 for each of the 4 lanes that hold this row of an operand. Its weights fill kSteps
// products of 16. Any of them may form one product if the activations are permuted alike, so a lane's 16 bytes and its
// kElements activations are both contiguous in memory.
//
// A format has: Operand, the type of activations and results; Product, that of operands; kElements (weights in 16
// bytes); kSteps = kElements / 4; kGroupSpans, the spans that are multiplied together; expand(); arrange(); kIsScaled: one
// fp32 scale a row, applied at the end; kIsScaledInside: load_scale(), one scale a row and group of spans; kIsRescaled:
// activations are multiplied by powers of two to fit Product.
#pragma once

#include "params/skinny_gemm_params.h"
#include "mma/warp_mma.cuh"

namespace slipstream {

// 16-bit weights are operands already.
template <typename T>
struct PlainWeights {
  using Operand = T;
  using Product = T;
  static constexpr int kElements = 8, kSteps = 2, kGroupSpans = 2;
  static constexpr bool kIsScaled = false, kIsScaledInside = false, kIsRescaled = false;

  // pairs[step]: this lane's two registers of one row for each product.
  static __device__ __forceinline__ void expand(const uint4& raw, uint32_t (&pairs)[kSteps][2]) {
    pairs[0][0] = raw.x, pairs[0][1] = raw.y, pairs[1][0] = raw.z, pairs[1][1] = raw.w;
  }

  // The same of one token's kElements activations.
  static __device__ __forceinline__ void arrange(const uint4 (&x)[1], uint32_t, uint32_t (&pairs)[kSteps][2]) {
    expand(x[0], pairs);
  }
};

// e4m3, expanded exactly to fp16: one instruction for two weights, and Hopper has none to bf16 (moving the bits into a
// bf16's place takes 7 for four, and made products of 1 to 8 tokens slower by up to a fifth). So bf16 activations
// become fp16 too: those of one token in a warp's columns of a chunk are multiplied by a power of two that brings the
// largest to 2^14..2^15, and the sum is multiplied by its inverse. What has not more than 8 bits of fraction stays
// exact down to 2^-32 of the largest; no magnitude overflows, and no token sees another.
template <typename T>
struct Fp8Weights {
  using Operand = T;
  using Product = __half;
  static constexpr int kElements = 16, kSteps = 4, kGroupSpans = 2;
  static constexpr bool kIsScaled = true, kIsScaledInside = false;
  static constexpr bool kIsRescaled = __is_same(T, __nv_bfloat16);

  static __device__ __forceinline__ void expand(const uint4& raw, uint32_t (&pairs)[kSteps][2]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      widen_e4m3(words[step], pairs[step][0], pairs[step][1]);
    }
  }

  static __device__ __forceinline__ void arrange(const uint4 (&x)[2], uint32_t scale, uint32_t (&pairs)[kSteps][2]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint4& half = x[step / 2];
      pairs[step][0] = narrow(step % 2 ? half.z : half.x, scale);
      pairs[step][1] = narrow(step % 2 ? half.w : half.y, scale);
    }
  }

 protected:
  // scale: a power of two, twice, of type T.
  static __device__ __forceinline__ uint32_t narrow(uint32_t pair, uint32_t scale) {
    if constexpr (!kIsRescaled) return pair;
    uint32_t scaled;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(scaled) : "r"(pair), "r"(scale));
    return pack<__half>(__uint_as_float(scaled << 16), __uint_as_float(scaled & 0xffff0000u));
  }
};

// e4m3 with one fp32 scale for each block of 128 x 128 weights: two spans of a row.
template <typename T>
struct BlockFp8Weights : Fp8Weights<T> {
  static constexpr bool kIsScaled = false, kIsScaledInside = true;

  static __device__ __forceinline__ float load_scale(const SkinnyGemmParams& p, int row, int column) {
    const float* scales = static_cast<const float*>(p.scale);
    return __ldg(scales + row / 128 * p.scale_row_stride + column / 128);
  }
};

// int8, expanded exactly to fp16, with activations as beside e4m3. A byte v + 128 in the low bits of fp16 1024 makes
// 1152 + v: five instructions for four weights.
template <typename T>
struct Int8Weights : Fp8Weights<T> {
  static constexpr int kSteps = Fp8Weights<T>::kSteps;

  static __device__ __forceinline__ void expand(const uint4& raw, uint32_t (&pairs)[kSteps][2]) {
    expand_bytes<0x4140, 0x4342>(raw, pairs);
  }

 protected:
  // Which bytes of a word become the pairs of a step.
  template <int LOW, int HIGH>
  static __device__ __forceinline__ void expand_bytes(const uint4& raw, uint32_t (&pairs)[kSteps][2]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t biased = words[step] ^ 0x80808080u;
      const uint32_t low = __byte_perm(biased, 0x64646464u, LOW), high = __byte_perm(biased, 0x64646464u, HIGH);
      asm("add.rn.f16x2 %0, %1, %2;" : "=r"(pairs[step][0]) : "r"(low), "r"(0xE480E480u));
      asm("add.rn.f16x2 %0, %1, %2;" : "=r"(pairs[step][1]) : "r"(high), "r"(0xE480E480u));
    }
  }
};

// The same of which 16 columns stand 0 8 1 9, 2 10 3 11, .. (int8_layout.py): a word is two of the first eight and two of
// the others.
template <typename T>
struct InterleavedInt8Weights : Int8Weights<T> {
  static constexpr int kSteps = Int8Weights<T>::kSteps;

  static __device__ __forceinline__ void expand(const uint4& raw, uint32_t (&pairs)[kSteps][2]) {
    Int8Weights<T>::template expand_bytes<0x4240, 0x4341>(raw, pairs);
  }

  static __device__ __forceinline__ void arrange(const uint4 (&x)[2], uint32_t scale, uint32_t (&pairs)[kSteps][2]) {
    const uint32_t low[4] = {x[0].x, x[0].y, x[0].z, x[0].w}, high[4] = {x[1].x, x[1].y, x[1].z, x[1].w};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      pairs[step][0] = Fp8Weights<T>::narrow(low[step], scale);
      pairs[step][1] = Fp8Weights<T>::narrow(high[step], scale);
    }
  }
};

}  // namespace slipstream
