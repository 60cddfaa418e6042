// Hopper's warpgroup products with both operands in shared memory: d[64 x N] (+)= a[64 x 32 bytes] b[N x 32 bytes]^T, rows
// under the 128-byte swizzle (rows_operand of hopper_mma.cuh).  Device code only; no framework header.
//
// Accumulator i of thread (warp w, lane l): row 16 w + l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (l % 4) + i % 2.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace slipstream {

#define SLIPSTREAM_OUT8(i)                                                                                    \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define SLIPSTREAM_OUT16(i) SLIPSTREAM_OUT8(i), SLIPSTREAM_OUT8(i + 8)
#define SLIPSTREAM_OUT32(i) SLIPSTREAM_OUT16(i), SLIPSTREAM_OUT16(i + 16)
#define SLIPSTREAM_LIST8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SLIPSTREAM_LIST16 SLIPSTREAM_LIST8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SLIPSTREAM_LIST32                                                                                            \
  SLIPSTREAM_LIST16                                                                                                  \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SLIPSTREAM_LIST64                                                                                         \
  SLIPSTREAM_LIST32                                                                                               \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SLIPSTREAM_PRODUCT(N, TYPES, LIST, A, B, ADD, ...)                                            \
  asm volatile("{.reg .pred add;\nsetp.ne.b32 add, %" ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" N \
               TYPES " {" LIST "}, %" A ", %" B SLIPSTREAM_FLAGS                                      \
               : __VA_ARGS__ : "l"(a), "l"(b), "r"(adds))
#define SLIPSTREAM_PRODUCT_OF(TYPES)                                                                            \
  if constexpr (N == 16) {                                                                                      \
    SLIPSTREAM_PRODUCT("16", TYPES, SLIPSTREAM_LIST8, "8", "9", "10", SLIPSTREAM_OUT8(0));                      \
  } else if constexpr (N == 32) {                                                                               \
    SLIPSTREAM_PRODUCT("32", TYPES, SLIPSTREAM_LIST16, "16", "17", "18", SLIPSTREAM_OUT16(0));                  \
  } else if constexpr (N == 64) {                                                                               \
    SLIPSTREAM_PRODUCT("64", TYPES, SLIPSTREAM_LIST32, "32", "33", "34", SLIPSTREAM_OUT32(0));                  \
  } else {                                                                                                      \
    SLIPSTREAM_PRODUCT("128", TYPES, SLIPSTREAM_LIST64, "64", "65", "66", SLIPSTREAM_OUT32(0), SLIPSTREAM_OUT32(32)); \
  }

// T: __half, __nv_bfloat16 or __nv_fp8_e4m3, of a and b.  N: 16, 32, 64, 128.  adds 0: d is overwritten.
template <typename T, int N>
__device__ __forceinline__ void multiply_shared(float (&d)[N / 2], uint64_t a, uint64_t b, int adds) {
  static_assert(N == 16 || N == 32 || N == 64 || N == 128);
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

#undef SLIPSTREAM_OUT8
#undef SLIPSTREAM_OUT16
#undef SLIPSTREAM_OUT32
#undef SLIPSTREAM_LIST8
#undef SLIPSTREAM_LIST16
#undef SLIPSTREAM_LIST32
#undef SLIPSTREAM_LIST64
#undef SLIPSTREAM_PRODUCT
#undef SLIPSTREAM_PRODUCT_OF

}  // namespace slipstream
