// The emulator's numbers.cuh: what of it the emulated kernels use.
#pragma once

#include <cuda_fp8.h>

#include "emulator.h"

namespace slipstream {

constexpr float kLog2E = 1.4426950408889634f;

inline float exp2_fast(float x) { return std::exp2(x); }

inline float inverse_normaliser(float normaliser, float maximum, float sink) {
  return normaliser == 0.0f ? 0.0f : 1.0f / (normaliser + exp2_fast(sink - maximum));
}

inline float silu(float x) { return x / (1.0f + __expf(-x)); }

inline float to_float(__half x) { return __half2float(x); }
inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
inline float to_float(__nv_fp8_e4m3 x) { return static_cast<float>(x); }

template <typename T>
T from_float(float x) {
  if constexpr (__is_same(T, __half)) return __float2half_rn(x);
  else return __float2bfloat16_rn(x);
}

template <typename T>
uint32_t bits_of(T x) {
  uint16_t bits;
  std::memcpy(&bits, &x, 2);
  return bits;
}

template <typename T>
uint32_t pack(float low, float high) {
  return bits_of(from_float<T>(low)) | bits_of(from_float<T>(high)) << 16;
}

template <typename T>
float2 unpack(uint32_t pair) {
  if constexpr (__is_same(T, __half)) return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  else return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

inline uint32_t multiply_pair(uint32_t pair, uint32_t factor) {
  const float2 a = unpack<__nv_bfloat16>(pair), b = unpack<__nv_bfloat16>(factor);
  return pack<__nv_bfloat16>(a.x * b.x, a.y * b.y);
}

}  // namespace slipstream
