// Between fp32 and what tensor cores take, and the few functions of fp32 that kernels share. Device code only; no
// framework header.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace slipstream {

constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What a row of weighted values is multiplied by, 0 for a row without keys. normaliser: the sum of exp2(score - maximum).
// sink: a score of the row without a value, base 2 as maximum is; -inf: none.
__device__ __forceinline__ float inverse_normaliser(float normaliser, float maximum, float sink) {
  return normaliser == 0.0f ? 0.0f : 1.0f / (normaliser + exp2_fast(sink - maximum));
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (__is_same(T, __half)) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

// Two values as one register, `low` in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (__is_same(T, __half)) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// The reverse of pack.
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (__is_same(T, __half)) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
}

// The products of two pairs of bf16, which may be subnormal.
__device__ __forceinline__ uint32_t multiply_pair(uint32_t pair, uint32_t factor) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factor));
  return product;
}

// Four e4m3 of a word to two pairs of fp16, in order.
__device__ __forceinline__ void widen_e4m3(uint32_t word, uint32_t& low, uint32_t& high) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(low), "=r"(high) : "r"(word));
}

}  // namespace slipstream
