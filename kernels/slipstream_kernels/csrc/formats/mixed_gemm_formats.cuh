// How a lane makes operands of products of the weights of 16 output features x 128 input features that lie in shared
// memory. A phase is two products of 32 bytes of the tokens' row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "formats/int4_codec.cuh"

namespace slipstream {

// Four matrices of 8 rows x 16 bytes, of which lane l gets bytes 4 (l % 4) + 0..3 of row l / 4.
__device__ __forceinline__ uint4 load_matrices(uint32_t address) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}

// int8 values as 16-bit numbers, exactly: bytes 0, 2 and 1, 3 of a word are pairs.
template <typename T>
struct Bytes;

// 1024 + (value + 128), less 1152.
template <>
struct Bytes<__half> {
  static __device__ __forceinline__ uint32_t pair(uint32_t word) {
    uint32_t biased, value;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(biased) : "r"(word), "r"(0x00FF00FFu), "r"(0x64806480u));
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(value) : "r"(biased), "r"(0xE480E480u));
    return value;
  }
};

// bf16 has 7 bits of fraction: 128 + the lower seven bits, less 128 or, where the sign is set, 256.
template <>
struct Bytes<__nv_bfloat16> {
  static __device__ __forceinline__ uint32_t pair(uint32_t word) {
    const uint32_t low = masked_or(word, 0x007F007Fu, 0x43004300u), sign = masked_or(word, 0x00800080u, 0xC300C300u);
    uint32_t value;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(value) : "r"(low), "r"(0x3F803F80u), "r"(sign));
    return value;
  }
};

// int8 weights beside 16-bit tokens; scales of rows are applied at the end. A strip is 16 rows of 128 bytes as a tensor
// copy swizzles them. Of 16 input features the bytes stand in the order of int8_layout.py: bytes 4 t + 0..3 of a row are
// features 2 t, 2 t + 8, 2 t + 1, 2 t + 9, what lane t of the row's four has in two operands.
template <typename T>
struct Bytes8By16 {
  using Operand = T;
  static constexpr int kPhases = 4, kStripBytes = 2048;
  uint4 raw[kPhases];

  __device__ __forceinline__ void load(uint32_t strip, int lane) {
    // Lanes 8 i + r name row r of matrix i: rows 0-7 and 8-15 of 16 bytes, then of the next 16.
    const uint32_t row = strip + lane / 8 % 2 * 1024 + lane % 8 * 128, piece = lane / 16;
#pragma unroll
    for (int i = 0; i < kPhases; ++i) raw[i] = load_matrices(row + ((2 * i + piece) ^ (lane % 8)) * 16);
  }

  // a: registers of two products.
  __device__ __forceinline__ void expand(int phase, uint32_t (&a)[8]) const {
    const uint32_t words[4] = {raw[phase].x, raw[phase].y, raw[phase].z, raw[phase].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i / 2 * 4 + i % 2] = Bytes<T>::pair(words[i]), a[i / 2 * 4 + i % 2 + 2] = Bytes<T>::pair(words[i] >> 8);
    }
  }
};

}  // namespace slipstream
