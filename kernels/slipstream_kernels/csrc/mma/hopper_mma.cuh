// Hopper's warpgroup products (wgmma) as thin inline PTX: a warpgroup (4 warps) multiplies 64 rows by N columns, with
// operands in shared memory under the 128-byte swizzle, as tensor copies write it, and sums in registers.
//
// Accumulator d of thread (warp w, lane l): row 16 w + l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (l % 4) + i % 2.
// Device code only; no framework header.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "mma/wgmma_lists.h"

namespace slipstream {

// Rows of 128 bytes in groups of eight make one swizzled unit.
constexpr int kSwizzleBytes = 128;
constexpr int kSwizzleUnit = 8 * kSwizzleBytes;

// Descriptor of an operand whose summed dimension is contiguous: units of eight rows follow each other.
__device__ __forceinline__ uint64_t rows_operand(uint32_t address) {
  return (uint64_t{1} << 62) | (uint64_t{kSwizzleUnit >> 4} << 32) | (uint64_t{1} << 16) | ((address & 0x3FFFF) >> 4);
}

// Descriptor of an operand whose summed dimension goes over the rows; `stride`: bytes from one slab of 64 columns to
// the next.
__device__ __forceinline__ uint64_t columns_operand(uint32_t address, int stride) {
  return (uint64_t{1} << 62) | (uint64_t{kSwizzleUnit >> 4} << 32) |
         (static_cast<uint64_t>(stride >> 4) << 16) | ((address & 0x3FFFF) >> 4);
}

// The same for rows of 64 bytes under the 64-byte swizzle.
__device__ __forceinline__ uint64_t narrow_rows_operand(uint32_t address) {
  return (uint64_t{2} << 62) | (uint64_t{kSwizzleUnit >> 5} << 32) | (uint64_t{1} << 16) | ((address & 0x3FFFF) >> 4);
}

// Keeps the compiler from moving uses of an accumulator over the asm statements around.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int N>
__device__ __forceinline__ void pin(uint32_t (&a)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the newest groups are still under way.
template <int PENDING>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}


// d (+)= a b^T over 16 summed columns, both operands in shared memory with contiguous summed dimension.
#define SLIPSTREAM_WGMMA_ROWS_OF(FLAGS, SHAPE, TYPES, LIST, A, B, ADD, ...)                                \
  asm volatile("{.reg .pred add;\nsetp.ne.b32 add, %" ADD ", 0;\nwgmma.mma_async.sync.aligned." SHAPE      \
               ".f32." TYPES " {" LIST "}, %" A ", %" B ", add, 1, 1" FLAGS ";}\n"                         \
               : __VA_ARGS__ : "l"(a), "l"(b), "n"(ADDS ? 1 : 0))
#define SLIPSTREAM_WGMMA_ROWS(...) SLIPSTREAM_WGMMA_ROWS_OF(", 0, 0", __VA_ARGS__)
// d += a b, a in registers, b's rows being the summed dimension.
#define SLIPSTREAM_WGMMA_COLUMNS(SHAPE, TYPES, LIST, A0, A1, A2, A3, B, OUTPUTS)                           \
  asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPES " {" LIST                               \
               "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", 1, 1, 1, 1;\n"                            \
               : OUTPUTS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// Scores: d[64 x 128] (+)= a[64 x 16] b[128 x 16]^T; e4m3: over 32 summed columns.
template <typename T, bool ADDS>
__device__ __forceinline__ void multiply_rows(float (&d)[64], uint64_t a, uint64_t b) {
#define SLIPSTREAM_OUTPUTS SLIPSTREAM_SUMS32(0), SLIPSTREAM_SUMS32(32)
  if constexpr (__is_same(T, __nv_fp8_e4m3)) {
    SLIPSTREAM_WGMMA_ROWS_OF("", "m64n128k32", "e4m3.e4m3", SLIPSTREAM_LIST64, "64", "65", "66", SLIPSTREAM_OUTPUTS);
  } else if constexpr (__is_same(T, __half)) {
    SLIPSTREAM_WGMMA_ROWS("m64n128k16", "f16.f16", SLIPSTREAM_LIST64, "64", "65", "66", SLIPSTREAM_OUTPUTS);
  } else {
    SLIPSTREAM_WGMMA_ROWS("m64n128k16", "bf16.bf16", SLIPSTREAM_LIST64, "64", "65", "66", SLIPSTREAM_OUTPUTS);
  }
#undef SLIPSTREAM_OUTPUTS
}

// The same for 64 rows of b.
template <typename T, bool ADDS>
__device__ __forceinline__ void multiply_rows(float (&d)[32], uint64_t a, uint64_t b) {
  if constexpr (__is_same(T, __half)) {
    SLIPSTREAM_WGMMA_ROWS("m64n64k16", "f16.f16", SLIPSTREAM_LIST32, "32", "33", "34", SLIPSTREAM_SUMS32(0));
  } else {
    SLIPSTREAM_WGMMA_ROWS("m64n64k16", "bf16.bf16", SLIPSTREAM_LIST32, "32", "33", "34", SLIPSTREAM_SUMS32(0));
  }
}

// The same for 192 rows of b.
template <typename T, bool ADDS>
__device__ __forceinline__ void multiply_rows(float (&d)[96], uint64_t a, uint64_t b) {
#define SLIPSTREAM_OUTPUTS SLIPSTREAM_SUMS32(0), SLIPSTREAM_SUMS32(32), SLIPSTREAM_SUMS32(64)
  if constexpr (__is_same(T, __nv_fp8_e4m3)) {
    SLIPSTREAM_WGMMA_ROWS_OF("", "m64n192k32", "e4m3.e4m3", SLIPSTREAM_LIST96, "96", "97", "98", SLIPSTREAM_OUTPUTS);
  } else if constexpr (__is_same(T, __half)) {
    SLIPSTREAM_WGMMA_ROWS("m64n192k16", "f16.f16", SLIPSTREAM_LIST96, "96", "97", "98", SLIPSTREAM_OUTPUTS);
  } else {
    SLIPSTREAM_WGMMA_ROWS("m64n192k16", "bf16.bf16", SLIPSTREAM_LIST96, "96", "97", "98", SLIPSTREAM_OUTPUTS);
  }
#undef SLIPSTREAM_OUTPUTS
}

// Values: d[64 x 128] += a[64 x 16] b[16 x 128]; a as four registers in the layout of two accumulator columns.
template <typename T>
__device__ __forceinline__ void multiply_columns(float (&d)[64], const uint32_t* a, uint64_t b) {
#define SLIPSTREAM_OUTPUTS SLIPSTREAM_SUMS32(0), SLIPSTREAM_SUMS32(32)
  if constexpr (__is_same(T, __half)) {
    SLIPSTREAM_WGMMA_COLUMNS("m64n128k16", "f16.f16", SLIPSTREAM_LIST64, "64", "65", "66", "67", "68",
                             SLIPSTREAM_OUTPUTS);
  } else {
    SLIPSTREAM_WGMMA_COLUMNS("m64n128k16", "bf16.bf16", SLIPSTREAM_LIST64, "64", "65", "66", "67", "68",
                             SLIPSTREAM_OUTPUTS);
  }
#undef SLIPSTREAM_OUTPUTS
}

// The same for 256 columns.
template <typename T>
__device__ __forceinline__ void multiply_columns(float (&d)[128], const uint32_t* a, uint64_t b) {
#define SLIPSTREAM_OUTPUTS SLIPSTREAM_SUMS32(0), SLIPSTREAM_SUMS32(32), SLIPSTREAM_SUMS32(64), SLIPSTREAM_SUMS32(96)
  if constexpr (__is_same(T, __half)) {
    SLIPSTREAM_WGMMA_COLUMNS("m64n256k16", "f16.f16", SLIPSTREAM_LIST128, "128", "129", "130", "131", "132",
                             SLIPSTREAM_OUTPUTS);
  } else {
    SLIPSTREAM_WGMMA_COLUMNS("m64n256k16", "bf16.bf16", SLIPSTREAM_LIST128, "128", "129", "130", "131", "132",
                             SLIPSTREAM_OUTPUTS);
  }
#undef SLIPSTREAM_OUTPUTS
}

// The same for 64 columns.
template <typename T>
__device__ __forceinline__ void multiply_columns(float (&d)[32], const uint32_t* a, uint64_t b) {
  if constexpr (__is_same(T, __half)) {
    SLIPSTREAM_WGMMA_COLUMNS("m64n64k16", "f16.f16", SLIPSTREAM_LIST32, "32", "33", "34", "35", "36",
                             SLIPSTREAM_SUMS32(0));
  } else {
    SLIPSTREAM_WGMMA_COLUMNS("m64n64k16", "bf16.bf16", SLIPSTREAM_LIST32, "32", "33", "34", "35", "36",
                             SLIPSTREAM_SUMS32(0));
  }
}

// Values of e4m3: d[64 x 128] (+)= a[64 x 32] b[128 x 32]^T; a in registers: of row l / 4 and of the one eight below, the
// columns 4 (l % 4) to 4 (l % 4) + 3 in two registers, the same sixteen columns later in the next two.
template <bool ADDS>
__device__ __forceinline__ void multiply_fp8_values(float (&d)[64], const uint32_t* a, uint64_t b) {
  asm volatile("{.reg .pred add;\nsetp.ne.b32 add, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
               "{" SLIPSTREAM_LIST64 "}, {%64, %65, %66, %67}, %68, add, 1, 1;}\n"
               : SLIPSTREAM_SUMS32(0), SLIPSTREAM_SUMS32(32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADDS ? 1 : 0));
}

#undef SLIPSTREAM_WGMMA_ROWS_OF
#undef SLIPSTREAM_WGMMA_ROWS
#undef SLIPSTREAM_WGMMA_COLUMNS

}  // namespace slipstream
