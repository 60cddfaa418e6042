// How each type of KV cache becomes operands of 16x8x16 products, straight from rows of tokens in shared memory.
//
// A column is 16 bytes of every token's row; two neighbouring columns of 16 tokens are loaded at once. Keys are the
// operand's rows (tokens x dims), values its columns (dims x tokens). The order of dims within a product is free as
// long as q (query_dim) and the output (value_dim) follow it, so no byte is moved that need not be.
// 8- and 4-bit types become fp16: exact for all of them, and Hopper has no conversion from e4m3 to bf16.
// Integers are not converted but placed: u in the low bits of an fp16 is the subnormal u * 2^-24, which the tensor
// cores multiply exactly. They are stored with an offset that makes them unsigned; query_factor, value_unit and kOffset
// undo both on the fp32 results: sum q (u - o) = 2^24 sum q u 2^-24 - o sum q.
#pragma once

#include "mma/warp_mma.cuh"

namespace slipstream {

enum class KvType { k16Bit = 0, kFp8E4m3 = 1, kInt8 = 2, kInt4 = 3 };

constexpr float kSubnormalUnit = 16777216.0f;  // 2^24
// Probabilities are multiplied by the tokens' value scales before they become fp16; this much more keeps the product
// of a small scale (values of 0.01) out of fp16's subnormals, where it would lose its digits.
constexpr float kOperandBoost = 64.0f;

template <KvType KV>
struct KvFormat;

template <>
struct KvFormat<KvType::k16Bit> {
  static constexpr int kBits = 16;
  static constexpr bool kIsInteger = false;
  static constexpr int kStepsPerPair = 1;  // products of 16 dims that two columns feed

  static __device__ __forceinline__ int query_dim(int step, int j, int b, int e) {
    return 16 * step + 2 * j + 8 * b + e;
  }
  static __device__ __forceinline__ int value_dim(int step, int i, int h) { return 16 * step + i + 8 * h; }
  static __device__ __forceinline__ void keys(const uint32_t (&r)[4], int, uint32_t (&a)[4]) {
    a[0] = r[0], a[1] = r[1], a[2] = r[2], a[3] = r[3];
  }
  static __device__ __forceinline__ void values(const uint32_t (&r)[4], int, uint32_t (&a)[4]) {
    a[0] = r[0], a[1] = r[2], a[2] = r[1], a[3] = r[3];
  }
};

template <>
struct KvFormat<KvType::kFp8E4m3> {
  static constexpr int kBits = 8;
  static constexpr bool kIsInteger = false;
  static constexpr int kStepsPerPair = 2;

  static __device__ __forceinline__ int query_dim(int step, int j, int b, int e) {
    return 16 * step + 4 * j + 2 * b + e;
  }
  static __device__ __forceinline__ int value_dim(int step, int i, int h) { return 16 * step + 2 * i + h; }
  static __device__ __forceinline__ void keys(const uint32_t (&r)[4], int step, uint32_t (&a)[4]) {
    widen_e4m3(r[2 * step], a[0], a[2]);
    widen_e4m3(r[2 * step + 1], a[1], a[3]);
  }
  // A transposed word holds two dims of one token, then the same dims of the next.
  static __device__ __forceinline__ void values(const uint32_t (&r)[4], int step, uint32_t (&a)[4]) {
    widen_e4m3(__byte_perm(r[2 * step], 0, 0x3120), a[0], a[1]);
    widen_e4m3(__byte_perm(r[2 * step + 1], 0, 0x3120), a[2], a[3]);
  }
};

template <>
struct KvFormat<KvType::kInt8> {
  static constexpr int kBits = 8;
  static constexpr bool kIsInteger = true;
  static constexpr int kStepsPerPair = 2;
  static constexpr float kOffset = 128.0f;

  static __device__ __forceinline__ int query_dim(int step, int j, int b, int e) {
    return 16 * step + 4 * j + b + 2 * e;
  }
  static __device__ __forceinline__ float query_factor(int) { return 1.0f; }
  static __device__ __forceinline__ int value_dim(int step, int i, int h) { return 16 * step + 2 * i + h; }
  static __device__ __forceinline__ float value_unit(int) { return kSubnormalUnit / kOperandBoost; }
  static __device__ __forceinline__ void bytes(uint32_t word, uint32_t& even, uint32_t& odd) {
    even = (word ^ 0x80808080u) & 0x00ff00ffu;
    odd = ((word >> 8) ^ 0x80808080u) & 0x00ff00ffu;
  }
  static __device__ __forceinline__ void keys(const uint32_t (&r)[4], int step, uint32_t (&a)[4]) {
    bytes(r[2 * step], a[0], a[2]);
    bytes(r[2 * step + 1], a[1], a[3]);
  }
  static __device__ __forceinline__ void values(const uint32_t (&r)[4], int step, uint32_t (&a)[4]) {
    bytes(r[2 * step], a[0], a[1]);
    bytes(r[2 * step + 1], a[2], a[3]);
  }
};

// Dim 2n is the low nibble of byte n, dim 2n + 1 the high one; the nibble is the value plus 8.
template <>
struct KvFormat<KvType::kInt4> {
  static constexpr int kBits = 4;
  static constexpr bool kIsInteger = true;
  static constexpr int kStepsPerPair = 4;
  static constexpr float kOffset = 8.0f;

  static __device__ __forceinline__ int query_dim(int step, int j, int b, int e) {
    return 32 * (step / 2) + 8 * j + 2 * (step % 2) + b + 4 * e;
  }
  // Odd nibbles stay where they are, 16 times as large.
  static __device__ __forceinline__ float query_factor(int b) { return b == 0 ? 1.0f : 0.0625f; }
  static __device__ __forceinline__ int value_dim(int step, int i, int h) {
    return 32 * (step / 2) + 4 * i + 2 * (step % 2) + h;
  }
  static __device__ __forceinline__ float value_unit(int h) {
    return kSubnormalUnit / kOperandBoost / (h == 0 ? 1.0f : 16.0f);
  }
  // Nibbles 2 * part and 2 * part + 1 of both 16-bit halves.
  static __device__ __forceinline__ void nibbles(uint32_t word, int part, uint32_t& even, uint32_t& odd) {
    const uint32_t shifted = part == 0 ? word : word >> 8;
    even = shifted & 0x000f000fu;
    odd = shifted & 0x00f000f0u;
  }
  static __device__ __forceinline__ void keys(const uint32_t (&r)[4], int step, uint32_t (&a)[4]) {
    nibbles(r[step / 2 * 2], step % 2, a[0], a[2]);
    nibbles(r[step / 2 * 2 + 1], step % 2, a[1], a[3]);
  }
  static __device__ __forceinline__ void values(const uint32_t (&r)[4], int step, uint32_t (&a)[4]) {
    nibbles(r[step / 2 * 2], step % 2, a[0], a[1]);
    nibbles(r[step / 2 * 2 + 1], step % 2, a[2], a[3]);
  }
};

}  // namespace slipstream
