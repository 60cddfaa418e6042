// 4-bit values in the order of int4_layout.py to 16-bit numbers, exactly.  Device code only; no framework header.
#pragma once

#include "mma/warp_mma.cuh"

namespace slipstream {

// (a & mask) | bits in one instruction.
__device__ __forceinline__ uint32_t masked_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}

// Nibbles 2 i and 2 i + 1 of a word as the halves of pair i, with `bits` above.
__device__ __forceinline__ void pair_neighbours(uint32_t word, uint32_t bits, uint32_t (&pairs)[4]) {
  const uint32_t odd = word >> 4;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    pairs[i] = masked_or(__byte_perm(word, odd, i | (4 + i) << 8), 0x000F000Fu, bits);
  }
}

// q - zero point of the eight 4-bit values q of a word, as four pairs (nibbles i and i + 4).
template <typename T>
struct Int4Converter;

// q in the low bits of fp16 1024 makes 1024 + q; four bits higher, 1024 + 16 q: one shift for two pairs.
template <>
struct Int4Converter<__half> {
  uint32_t low, high;   // -(1024 + zero), -(64 + zero), each in both halves

  __device__ __forceinline__ explicit Int4Converter(uint32_t zero) {
    low = 0xE400E400u + zero * 0x00010001u;
    high = 0xD400D400u + zero * 0x00100010u;
  }

  __device__ __forceinline__ void expand(uint32_t word, uint32_t (&pairs)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t a = masked_or(word, 0x000F000Fu, 0x64006400u), b = masked_or(word, 0x00F000F0u, 0x64006400u);
      asm("add.rn.f16x2 %0, %1, %2;" : "=r"(pairs[2 * i]) : "r"(a), "r"(low));
      asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pairs[2 * i + 1]) : "r"(b), "r"(0x2C002C00u), "r"(high));
      word >>= 8;
    }
  }

  // Nibbles 2 i and 2 i + 1 as pair i.
  __device__ __forceinline__ void expand_in_order(uint32_t word, uint32_t (&pairs)[4]) const {
    pair_neighbours(word, 0x64006400u, pairs);
#pragma unroll
    for (uint32_t& pair : pairs) asm("add.rn.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(low));
  }
};

// bf16 has 7 bits of fraction: 128 + q, one pair at a time.
template <>
struct Int4Converter<__nv_bfloat16> {
  uint32_t low;   // -(128 + zero), in both halves

  __device__ __forceinline__ explicit Int4Converter(uint32_t zero) : low(0xC300C300u + zero * 0x00010001u) {}

  __device__ __forceinline__ void expand(uint32_t word, uint32_t (&pairs)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t a = masked_or(word >> (4 * i), 0x000F000Fu, 0x43004300u);
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pairs[i]) : "r"(a), "r"(0x3F803F80u), "r"(low));
    }
  }

  __device__ __forceinline__ void expand_in_order(uint32_t word, uint32_t (&pairs)[4]) const {
    pair_neighbours(word, 0x43004300u, pairs);
#pragma unroll
    for (uint32_t& pair : pairs) asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(0x3F803F80u), "r"(low));
  }
};

// The scale of a packed scale and zero point.
__device__ __forceinline__ float scale_of(uint32_t word) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
}

// (q - zero point) * scale of a row's values, rounded once.
template <typename T>
struct ScaledInt4Converter {
  Int4Converter<T> codec;
  uint32_t scale;   // in both halves

  __device__ __forceinline__ explicit ScaledInt4Converter(uint32_t word) : codec(word >> 16) {
    const float value = scale_of(word);
    scale = pack<T>(value, value);
  }

  __device__ __forceinline__ void expand(uint32_t word, uint32_t (&pairs)[4]) const {
    codec.expand(word, pairs);
    multiply(pairs);
  }

  // Nibbles 2 i and 2 i + 1 as pair i.
  __device__ __forceinline__ void expand_in_order(uint32_t word, uint32_t (&pairs)[4]) const {
    codec.expand_in_order(word, pairs);
    multiply(pairs);
  }

 private:
  __device__ __forceinline__ void multiply(uint32_t (&pairs)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (__is_same(T, __half)) {
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pairs[i]) : "r"(pairs[i]), "r"(scale));
      } else {
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pairs[i]) : "r"(pairs[i]), "r"(scale));
      }
    }
  }
};

}  // namespace slipstream
