// Weight formats of the mixed-input product: how a lane makes register operands of the weights of 16 output features x 128
// input features (a tile's block) that lie in shared memory.
//
// A format has: Operand, the type of activations and products; kPhases of a block, each of two products over 32 bytes of
// a token's row; kGroups of a block with scales of their own (0: scales are of whole rows alone); kOrder, kTileBytes and
// kScaleBytes (of packed scale words) of a tile's block; kTokenColumns of products of each token; load(), expand().
// kIsScaledInside: sums of a group leave the tensor cores for fp32 registers, where scale and zero point are applied.
// Device code only; no framework header.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "formats/int4_converter.cuh"

namespace slipstream {

// How weights lie in global memory. kRows: row-major. kBlocks: blocks of 128 input features follow each other, in each
// the tiles: any run of a block's tiles is one copy. kTiles: the blocks of a tile follow each other.
enum class WeightOrder { kRows, kBlocks, kTiles };

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

// int8 weights beside 16-bit tokens; scales of rows are applied at the end. A tile's block is 16 rows of 128 bytes as a
// tensor copy swizzles them. The bytes of each 16 input features stand in the order of int8_layout.py: bytes 4 t + 0..3 of
// a row are features 2 t, 2 t + 8, 2 t + 1, 2 t + 9, which lane t of the row's four holds in two operands.
template <typename T, int GROUPS = 0>
struct W8A16 {
  static_assert(GROUPS == 0);
  using Operand = T;
  static constexpr WeightOrder kOrder = WeightOrder::kRows;
  static constexpr bool kIsScaledInside = false;
  static constexpr int kPhases = 4, kGroups = 0, kTileBytes = 2048, kScaleBytes = 0, kTokenColumns = 1;
  uint4 raw[kPhases];

  // Lanes 8 i + r name row r of matrix i: rows 0-7 and 8-15 of 16 bytes, then of the next 16.
  static __device__ __forceinline__ uint32_t offset(int lane) { return lane / 8 % 2 * 1024 + lane % 8 * 128; }

  __device__ __forceinline__ void load(int phase, uint32_t from, int lane) {
    raw[phase] = load_matrices(from + ((2 * phase + lane / 16) ^ (lane % 8)) * 16);
  }

  // a: registers of two products.
  __device__ __forceinline__ void expand(int phase, uint32_t (&a)[8]) const {
    const uint32_t words[4] = {raw[phase].x, raw[phase].y, raw[phase].z, raw[phase].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i / 2 * 4 + i % 2] = Bytes<T>::pair(words[i]), a[i / 2 * 4 + i % 2 + 2] = Bytes<T>::pair(words[i] >> 8);
    }
  }

  // Expanding does not move before what is written in front of this.
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (auto& v : raw) asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory");
  }
};

// A row's scale, and what is added to sums before: scale * (sum + bias * sum of activations).
struct RowScale {
  float scale, bias;
};

// Nibbles 0 and 4 of a word as two 16-bit operands without rounding, and what turns their products' sums into those of
// code - zero: kStep * (sum + bias * sum of activations), of a packed word with the zero point in its upper half.
template <typename T>
struct Int4Codes;

// 128 + code. A subnormal one would be lost: its products are too small for fp32.
template <>
struct Int4Codes<__nv_bfloat16> {
  static constexpr float kStep = 1.0f;
  static __device__ __forceinline__ uint32_t pair(uint32_t word) { return masked_or(word, 0x000F000Fu, 0x43004300u); }
  // -(128 + zero): the upper half of an fp32 number.
  static __device__ __forceinline__ float bias(uint32_t word) { return __uint_as_float((word & 0xFFFF0000u) | 0xC3000000u); }
};

// The code as a subnormal number, 2^-24 times itself.
template <>
struct Int4Codes<__half> {
  static constexpr float kStep = 16777216.0f;
  static __device__ __forceinline__ uint32_t pair(uint32_t word) { return word & 0x000F000Fu; }
  static __device__ __forceinline__ float bias(uint32_t word) {
    return (Int4Codes<__nv_bfloat16>::bias(word) + 128.0f) * (1.0f / kStep);
  }
};

// A lane's packed scale words of a tile's block: of each group those of rows l / 4 and l / 4 + 8.
template <int GROUPS>
struct PackedScales {
  uint32_t words[GROUPS][2];

  // Of a lane's words among those of a tile's block, [row][group].
  static __device__ __forceinline__ uint32_t offset(int lane) { return lane / 4 * GROUPS * 4; }

  __device__ __forceinline__ void load(uint32_t from) {
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; ++i) words[i / 2][i % 2] = load_shared_4(from + (8 * (i % 2) * GROUPS + i / 2) * 4);
  }
};

// Eight codes of a word as two e4m3 operand registers: a nibble in the low bits of e4m3 is code / 512, exactly.
__device__ __forceinline__ void split_codes(uint32_t word, uint32_t& low, uint32_t& high) {
  low = word & 0x0F0F0F0Fu, high = word >> 4 & 0x0F0F0F0Fu;
}

// 4-bit weights beside e4m3 tokens, in the order of slipstream_kernels/w4a8_layout.py: a lane has the 16 bytes of a phase
// side by side. Eight codes take three instructions; a zero point is a multiple of the activations' sum. A packed word is fp16 512 * scale of a row and group, and fp16 -zero / 512 above.
template <typename T, int GROUPS>
struct W4A8 {
  using Operand = T;
  static constexpr WeightOrder kOrder = WeightOrder::kBlocks;
  static constexpr bool kIsScaledInside = true;
  static constexpr int kPhases = 2, kGroups = GROUPS, kTileBytes = 1024, kScaleBytes = 64 * GROUPS, kTokenColumns = 1;
  using Scales = PackedScales<GROUPS>;
  uint4 raw[kPhases];
  Scales scales;

  static __device__ __forceinline__ uint32_t offset(int lane) { return 16 * lane; }

  __device__ __forceinline__ void load(int phase, uint32_t from, int) { raw[phase] = load_shared_16(from + 512 * phase); }

  __device__ __forceinline__ void expand(int phase, uint32_t (&a)[8]) const {
    split_codes(raw[phase].x, a[0], a[2]), split_codes(raw[phase].y, a[1], a[3]);
    split_codes(raw[phase].z, a[4], a[6]), split_codes(raw[phase].w, a[5], a[7]);
  }

  __device__ __forceinline__ void pin() {
#pragma unroll
    for (auto& v : raw) asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory");
  }

  static __device__ __forceinline__ RowScale row_scale(uint32_t word) {
    return {scale_of(word), scale_of(word >> 16)};
  }
};

// 4-bit weights beside 16-bit tokens, in the order of slipstream_kernels/int4_layout.py. A lane's word has features 4 t + i
// and 16 + 4 t + i of 32 as nibbles i and i + 4 for a pair, so the tokens' features are permuted alike (permute_features).
// A packed word is the fp16 scale of a row and group, and the zero point above it.
template <typename T, int GROUPS>
struct PackedW4A16 {
  using Operand = T;
  static constexpr WeightOrder kOrder = WeightOrder::kTiles;
  static constexpr int kPhases = 4, kGroups = GROUPS, kTileBytes = 1024, kScaleBytes = 64 * GROUPS, kTokenColumns = 1;
  using Scales = PackedScales<GROUPS>;
  uint2 raw[kPhases];
  Scales scales;

  static __device__ __forceinline__ uint32_t offset(int lane) { return 8 * lane; }

  __device__ __forceinline__ void load(int phase, uint32_t from, int) { raw[phase] = load_shared_8(from + 256 * phase); }

  __device__ __forceinline__ void pin() {
#pragma unroll
    for (auto& v : raw) asm volatile("" : "+r"(v.x), "+r"(v.y)::"memory");
  }
};

// Operands are (code - zero) * scale, rounded once: 15 instructions for eight codes, and sums stay in the tensor cores. For
// tiles of many tokens.
template <typename T, int GROUPS>
struct W4A16 : PackedW4A16<T, GROUPS> {
  static constexpr bool kIsScaledInside = false;

  __device__ __forceinline__ void expand(int phase, uint32_t (&a)[8]) const {
    uint32_t upper[4], lower[4];
    const auto& of_rows = this->scales.words[phase * GROUPS / this->kPhases];
    ScaledInt4Converter<T>(of_rows[0]).expand(this->raw[phase].x, upper);
    ScaledInt4Converter<T>(of_rows[1]).expand(this->raw[phase].y, lower);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[2 * i] = upper[i], a[2 * i + 1] = lower[i];
  }
};

// Operands are codes with a constant added (Int4Codes): 7 instructions for eight codes. Scale, zero point and the constant
// are applied to the sums of a group. For tiles of few tokens: the work on sums grows with them.
template <typename T, int GROUPS>
struct W4A16Sums : PackedW4A16<T, GROUPS> {
  static constexpr bool kIsScaledInside = true;

  __device__ __forceinline__ void expand(int phase, uint32_t (&a)[8]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[2 * i] = Int4Codes<T>::pair(this->raw[phase].x >> (4 * i));
      a[2 * i + 1] = Int4Codes<T>::pair(this->raw[phase].y >> (4 * i));
    }
  }

  static __device__ __forceinline__ RowScale row_scale(uint32_t word) {
    return {scale_of(word) * Int4Codes<T>::kStep, Int4Codes<T>::bias(word)};
  }
};

// The same weights beside bf16 tokens in pairs of e4m3 numbers (split_rows.cuh): a token has two columns of products, and
// operands are codes / 512 as beside e4m3 tokens. T: e4m3. The nibbles of a word that become a register are features 4 t,
// 4 t + 2, 16 + 4 t, 16 + 4 t + 2 of 32, and those that follow each: the tokens' features are permuted alike.
template <typename T, int GROUPS>
struct W4A16Pairs : PackedW4A16<T, GROUPS> {
  static constexpr bool kIsScaledInside = true;
  static constexpr int kPhases = 2, kTokenColumns = 2;

  __device__ __forceinline__ void load(int phase, uint32_t from, int lane) {
    PackedW4A16<T, GROUPS>::load(2 * phase, from, lane), PackedW4A16<T, GROUPS>::load(2 * phase + 1, from, lane);
  }

  __device__ __forceinline__ void expand(int phase, uint32_t (&a)[8]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      split_codes(this->raw[2 * phase + i].x, a[4 * i], a[4 * i + 2]);
      split_codes(this->raw[2 * phase + i].y, a[4 * i + 1], a[4 * i + 3]);
    }
  }

  // Exact: 512 * scale, and -zero / 512 of -(128 + zero).
  static __device__ __forceinline__ RowScale row_scale(uint32_t word) {
    return {512.0f * scale_of(word), __fmaf_rn(Int4Codes<__nv_bfloat16>::bias(word), 1.0f / 512, 0.25f)};
  }
};

}  // namespace slipstream
