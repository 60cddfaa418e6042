// Hopper's warpgroup products with both operands in shared memory: d[64 x N] (+)= a[64 x 32 bytes] b[N x 32 bytes]^T,
// rows under the 128-byte swizzle (rows_operand of hopper_mma.cuh).  Device code only; no framework header.
//
// Accumulator i of thread (warp w, lane l): row 16 w + l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (l % 4) + i % 2.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "mma/wgmma_lists.h"

namespace slipstream {

#define SLIPSTREAM_PRODUCT(N, TYPES, LIST, A, B, ADD, ...)                                            \
  asm volatile("{.reg .pred add;\nsetp.ne.b32 add, %" ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" N \
               TYPES " {" LIST "}, %" A ", %" B SLIPSTREAM_FLAGS                                      \
               : __VA_ARGS__ : "l"(a), "l"(b), "r"(adds))
#define SLIPSTREAM_PRODUCT_OF(TYPES)                                                                            \
  if constexpr (N == 16) {                                                                                      \
    SLIPSTREAM_PRODUCT("16", TYPES, SLIPSTREAM_LIST8, "8", "9", "10", SLIPSTREAM_SUMS8(0));                      \
  } else if constexpr (N == 32) {                                                                               \
    SLIPSTREAM_PRODUCT("32", TYPES, SLIPSTREAM_LIST16, "16", "17", "18", SLIPSTREAM_SUMS16(0));                  \
  } else if constexpr (N == 64) {                                                                               \
    SLIPSTREAM_PRODUCT("64", TYPES, SLIPSTREAM_LIST32, "32", "33", "34", SLIPSTREAM_SUMS32(0));                  \
  } else if constexpr (N == 80) {                                                                               \
    SLIPSTREAM_PRODUCT("80", TYPES, SLIPSTREAM_LIST40, "40", "41", "42", SLIPSTREAM_SUMS32(0), SLIPSTREAM_SUMS8(32));   \
  } else if constexpr (N == 96) {                                                                               \
    SLIPSTREAM_PRODUCT("96", TYPES, SLIPSTREAM_LIST48, "48", "49", "50", SLIPSTREAM_SUMS32(0), SLIPSTREAM_SUMS16(32));  \
  } else if constexpr (N == 112) {                                                                              \
    SLIPSTREAM_PRODUCT("112", TYPES, SLIPSTREAM_LIST56, "56", "57", "58", SLIPSTREAM_SUMS32(0), SLIPSTREAM_SUMS16(32), \
                       SLIPSTREAM_SUMS8(48));                                                                   \
  } else {                                                                                                      \
    SLIPSTREAM_PRODUCT("128", TYPES, SLIPSTREAM_LIST64, "64", "65", "66", SLIPSTREAM_SUMS32(0), SLIPSTREAM_SUMS32(32)); \
  }

// T: __half, __nv_bfloat16 or __nv_fp8_e4m3, of a and b.  N: 16, 32, 64, 80, 96, 112, 128.  adds 0: d is overwritten.
template <typename T, int N>
__device__ __forceinline__ void multiply_shared(float (&d)[N / 2], uint64_t a, uint64_t b, int adds) {
  static_assert(N == 16 || N == 32 || N == 64 || N == 80 || N == 96 || N == 112 || N == 128);
  if constexpr (__is_same(T, __nv_fp8_e4m3)) {
#define SLIPSTREAM_FLAGS ", add, 1, 1;}\n"
    SLIPSTREAM_PRODUCT_OF("k32.f32.e4m3.e4m3")
#undef SLIPSTREAM_FLAGS
#define SLIPSTREAM_FLAGS ", add, 1, 1, 0, 0;}\n"
  } else if constexpr (__is_same(T, __half)) {
    SLIPSTREAM_PRODUCT_OF("k16.f32.f16.f16")
  } else {
    SLIPSTREAM_PRODUCT_OF("k16.f32.bf16.bf16")
  }
#undef SLIPSTREAM_FLAGS
}

// d[64 x N] += a b in bf16: a [16 x 64], whose rows are summed over (columns_operand of hopper_mma.cuh), b [N x 16]. N: 16, 32.
#define SLIPSTREAM_FLAGS ", add, 1, 1, 1, 0;}\n"
template <int N>
__device__ __forceinline__ void multiply_slab(float (&d)[N / 2], uint64_t a, uint64_t b) {
  static_assert(N == 16 || N == 32);
  constexpr int adds = 1;
  SLIPSTREAM_PRODUCT_OF("k16.f32.bf16.bf16")
}
#undef SLIPSTREAM_FLAGS

#undef SLIPSTREAM_PRODUCT
#undef SLIPSTREAM_PRODUCT_OF

}  // namespace slipstream
