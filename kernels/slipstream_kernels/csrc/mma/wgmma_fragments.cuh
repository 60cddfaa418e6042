// Hopper's warpgroup products with the first operand in registers: d[64 x N] (+)= a[64 x 32 bytes] b[N x 32 bytes]^T,
// b in shared memory as core matrices, or as rows of 128 bytes that tensor copies swizzle (rows_operand of hopper_mma.cuh).
//
// Thread (warp w, lane l) holds of a: rows 16 w + l / 4 (registers 0, 2) and 8 further (1, 3), bytes 4 (l % 4) + 0..3
// (registers 0, 1) and 16 further (2, 3): four e4m3 or two 16-bit elements each.
// Accumulator i: row 16 w + l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (l % 4) + i % 2.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "mma/wgmma_lists.h"

namespace slipstream {

// Core matrices of 8 rows x 16 bytes, not swizzled: those of eight more summed columns are `k_stride` bytes away, those
// of eight more rows 128.
__device__ __forceinline__ uint64_t core_matrices(uint32_t address, uint32_t k_stride) {
  return (uint64_t{128 >> 4} << 32) | (uint64_t{k_stride >> 4} << 16) | ((address & 0x3FFFF) >> 4);
}

#define SLIPSTREAM_LIST52 SLIPSTREAM_LIST48 ", %48, %49, %50, %51"
#define SLIPSTREAM_PRODUCT(N, TYPES, LIST, A0, A1, A2, A3, B, ADD, ...)                                               \
  asm volatile("{.reg .pred add;\nsetp.ne.b32 add, %" ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" N                 \
               TYPES " {" LIST "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B SLIPSTREAM_FLAGS                        \
               : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds))
#define SLIPSTREAM_PRODUCT_OF(TYPES)                                                                                  \
  if constexpr (N == 8) {                                                                                             \
    SLIPSTREAM_PRODUCT("8", TYPES, "%0, %1, %2, %3", "4", "5", "6", "7", "8", "9", SLIPSTREAM_SUMS4(0));              \
  } else if constexpr (N == 16) {                                                                                     \
    SLIPSTREAM_PRODUCT("16", TYPES, SLIPSTREAM_LIST8, "8", "9", "10", "11", "12", "13", SLIPSTREAM_SUMS8(0));         \
  } else if constexpr (N == 32) {                                                                                     \
    SLIPSTREAM_PRODUCT("32", TYPES, SLIPSTREAM_LIST16, "16", "17", "18", "19", "20", "21", SLIPSTREAM_SUMS16(0));     \
  } else if constexpr (N == 48) {                                                                                     \
    SLIPSTREAM_PRODUCT("48", TYPES, SLIPSTREAM_LIST24, "24", "25", "26", "27", "28", "29", SLIPSTREAM_SUMS16(0),      \
                       SLIPSTREAM_SUMS8(16));                                                                         \
  } else if constexpr (N == 64) {                                                                                     \
    SLIPSTREAM_PRODUCT("64", TYPES, SLIPSTREAM_LIST32, "32", "33", "34", "35", "36", "37", SLIPSTREAM_SUMS32(0));     \
  } else if constexpr (N == 80) {                                                                                     \
    SLIPSTREAM_PRODUCT("80", TYPES, SLIPSTREAM_LIST40, "40", "41", "42", "43", "44", "45", SLIPSTREAM_SUMS32(0),      \
                       SLIPSTREAM_SUMS8(32));                                                                         \
  } else if constexpr (N == 96) {                                                                                     \
    SLIPSTREAM_PRODUCT("96", TYPES, SLIPSTREAM_LIST48, "48", "49", "50", "51", "52", "53", SLIPSTREAM_SUMS32(0),      \
                       SLIPSTREAM_SUMS16(32));                                                                        \
  } else if constexpr (N == 104) {                                                                                    \
    SLIPSTREAM_PRODUCT("104", TYPES, SLIPSTREAM_LIST52, "52", "53", "54", "55", "56", "57", SLIPSTREAM_SUMS32(0),     \
                       SLIPSTREAM_SUMS16(32), SLIPSTREAM_SUMS4(48));                                                  \
  } else if constexpr (N == 112) {                                                                                    \
    SLIPSTREAM_PRODUCT("112", TYPES, SLIPSTREAM_LIST56, "56", "57", "58", "59", "60", "61", SLIPSTREAM_SUMS32(0),     \
                       SLIPSTREAM_SUMS16(32), SLIPSTREAM_SUMS8(48));                                                  \
  } else {                                                                                                            \
    SLIPSTREAM_PRODUCT("128", TYPES, SLIPSTREAM_LIST64, "64", "65", "66", "67", "68", "69", SLIPSTREAM_SUMS32(0),     \
                       SLIPSTREAM_SUMS32(32));                                                                        \
  }

// T: __half, __nv_bfloat16 or __nv_fp8_e4m3, of a and b.  adds 0: d is overwritten.
template <typename T, int N>
__device__ __forceinline__ void multiply_fragment(float (&d)[N / 2], const uint32_t* a, uint64_t b, int adds) {
  static_assert(N == 8 || N == 16 || N == 32 || N == 48 || N == 64 || N == 80 || N == 96 || N == 104 || N == 112 ||
                N == 128);
  if constexpr (__is_same(T, __nv_fp8_e4m3)) {
#define SLIPSTREAM_FLAGS ", add, 1, 1;}\n"
    SLIPSTREAM_PRODUCT_OF("k32.f32.e4m3.e4m3")
#undef SLIPSTREAM_FLAGS
#define SLIPSTREAM_FLAGS ", add, 1, 1, 0;}\n"
  } else if constexpr (__is_same(T, __half)) {
    SLIPSTREAM_PRODUCT_OF("k16.f32.f16.f16")
  } else {
    SLIPSTREAM_PRODUCT_OF("k16.f32.bf16.bf16")
  }
#undef SLIPSTREAM_FLAGS
}

#undef SLIPSTREAM_PRODUCT
#undef SLIPSTREAM_PRODUCT_OF
#undef SLIPSTREAM_LIST52

}  // namespace slipstream
