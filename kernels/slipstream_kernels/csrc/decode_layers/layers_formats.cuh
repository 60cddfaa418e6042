// Weight formats of the kernel of all layers: which activations a lane holds, what a slot of the ring holds, and their
// product. bf16 activations; fp32 sums.
//
// A chunk of input features is split evenly over the 8 consumer warps; a warp's slice of it is held as operands of
// 16x8x16 products, token l / 4 in lane l. Which features form one product is free as long as weights and activations
// agree, so what a lane takes of either is contiguous. Slices are whole or empty: in_features are a multiple of them.
// Row formats: a slot has 8 rows of a chunk, two slots are a tile of 16 rows. Tiled: a slot has a tile of 16 rows.
#pragma once

#include "decode_layers/layers_shape.cuh"

namespace slipstream {

// A lane's activations of a chunk as they lie in memory. FORMAT::offset(vector, j): the first feature of each vector.
template <typename FORMAT>
struct Slice {
  static constexpr int kWords = FORMAT::kVectorWords;
  uint32_t of[FORMAT::kVectors][kWords];

  // from: the token's row at the warp's first feature. CAN_CHANGE: other CTAs write it in this kernel.
  template <bool CAN_CHANGE>
  __device__ __forceinline__ void load(const __nv_bfloat16* from, bool exists) {
    const int j = threadIdx.x % 4;
#pragma unroll
    for (int v = 0; v < FORMAT::kVectors; ++v) {
      const __nv_bfloat16* at = from + FORMAT::offset(v, j);
      if constexpr (kWords == 4) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (exists) x = CAN_CHANGE ? load_l2_16(at) : __ldg(reinterpret_cast<const uint4*>(at));
        of[v][0] = x.x, of[v][1] = x.y, of[v][2] = x.z, of[v][3] = x.w;
      } else {
        uint2 x = make_uint2(0, 0);
        if (exists) x = CAN_CHANGE ? load_l2_8(at) : __ldg(reinterpret_cast<const uint2*>(at));
        of[v][0] = x.x, of[v][1] = x.y;
      }
    }
  }
};

// What was computed of it is not kept: twice the registers, as floats, were spilled until a barrier was passed.
__device__ __forceinline__ void forget(uint32_t& pair) { asm volatile("" : "+r"(pair)); }

template <int ROWS>
__device__ __forceinline__ void clear_words(uint32_t (&words)[ROWS][4]) {
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
#pragma unroll
    for (int w = 0; w < 4; ++w) words[row][w] = 0;
  }
}

__device__ __forceinline__ float sum_of(const float (&parts)[4][4], int e) {
  return (parts[0][e] + parts[1][e]) + (parts[2][e] + parts[3][e]);
}

// A lane's part of two rows of weights.
template <int SPANS>
struct RowWeights {
  uint4 top[SPANS], bottom[SPANS];

  // low, high: shared addresses of this lane's first 16 bytes in rows l / 4 and l / 4 + 8.
  __device__ __forceinline__ void load(uint32_t low, uint32_t high, uint32_t) {
#pragma unroll
    for (int span = 0; span < SPANS; ++span) {
      top[span] = load_shared_16(low + span * 64), bottom[span] = load_shared_16(high + span * 64);
    }
  }
};

// bf16 rows are operands already.
struct PlainRows {
  static constexpr bool kIsTiled = false, kIsScaled = false;
  static constexpr int kChunk = 1024, kSlice = kChunk / 8, kFeatureBits = 16;
  static constexpr int kRowPitch = 2048 + 64, kSlotBytes = 8 * kRowPitch;   // padding: two rows in other banks
  static constexpr int kVectors = 4, kVectorWords = 4;
  static constexpr int kSpans = 4, kSpanFeatures = 32;

  static __device__ __forceinline__ int offset(int v, int j) { return v * kSpanFeatures + 8 * j; }

  // Of bytes of a staged row: tokens whose rows begin in the same bank take other parts of it.
  static __device__ __forceinline__ int swizzle(int token) { return token % 2 * 64; }

  struct Operands {
    uint32_t pairs[kSpans][4];
    __device__ __forceinline__ void clear() { clear_words(pairs); }

    __device__ __forceinline__ void convert(const uint32_t (&from)[2], int, uint32_t (&words)[2]) {
      words[0] = from[0], words[1] = from[1];
    }

    __device__ __forceinline__ void read(uint32_t row, int swizzle) {
#pragma unroll
      for (int span = 0; span < kSpans; ++span) {
        const uint4 x = load_shared_16(row + (64 * span ^ swizzle) + threadIdx.x % 4 * 16);
        pairs[span][0] = x.x, pairs[span][1] = x.y, pairs[span][2] = x.z, pairs[span][3] = x.w;
      }
    }

    __device__ __forceinline__ void finish() {}
    __device__ __forceinline__ void arrange(const Slice<PlainRows>& x) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int w = 0; w < 4; ++w) pairs[v][w] = x.of[v][w];
      }
    }
  };

  using Weights = RowWeights<kSpans>;

  static __device__ __forceinline__ void multiply(const Weights& w, const Operands& x, float (&sums)[4]) {
    float parts[4][4] = {};
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
      const uint4 top = w.top[span], bottom = w.bottom[span];
      const uint32_t first[4] = {top.x, bottom.x, top.y, bottom.y}, second[4] = {top.z, bottom.z, top.w, bottom.w};
      multiply_add<__nv_bfloat16>(parts[span % 2 * 2], first, x.pairs[span][0], x.pairs[span][1]);
      multiply_add<__nv_bfloat16>(parts[span % 2 * 2 + 1], second, x.pairs[span][2], x.pairs[span][3]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[e] += sum_of(parts, e);
  }
};

// The power of two, as two bf16, that brings the largest of a token's activations in this slice to 2^14..2^15, so that
// they are fp16 with all their digits; factors: its inverses for the tokens of a lane's sums, 2 (l % 4) + 0, 1.
template <typename FORMAT>
__device__ __forceinline__ uint32_t fit_to_half(const Slice<FORMAT>& x, float (&factors)[2]) {
  constexpr uint32_t kMagnitude = 0x7fff7fffu, kLargestField = 253;
  uint32_t two = 0;
#pragma unroll
  for (int v = 0; v < FORMAT::kVectors; ++v) {
#pragma unroll
    for (int w = 0; w < FORMAT::kVectorWords; ++w) two = __vmaxu2(two, x.of[v][w] & kMagnitude);
  }
  uint32_t largest = most(two & 0xffffu, two >> 16);
  largest = most(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  largest = most(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
  // Exponent fields: of the largest, 127 + 14 - that of the scale around 127, and the inverse's.
  const uint32_t field = least(268u - (largest >> 7), kLargestField);
  const float inverse = __uint_as_float((254u - field) << 23);
#pragma unroll
  for (int e = 0; e < 2; ++e) factors[e] = __shfl_sync(0xffffffffu, inverse, threadIdx.x % 4 * 8 + 4 * e);
  return field << 23 | field << 7;
}

// The same where all lanes have features of one token. magnitudes: this lane's largest. Its inverse is kept by the lanes
// whose sums are of this token: 2 (l % 4) + 0, 1.
__device__ __forceinline__ uint32_t fit_token_to_half(uint32_t magnitudes, int token, float (&factors)[2]) {
  constexpr uint32_t kLargestField = 253;
  const uint32_t largest = warp_most(most(magnitudes & 0xffffu, magnitudes >> 16));
  // Exponent fields: of the largest, 127 + 14 - that of the scale around 127, and the inverse's.
  const uint32_t field = least(268u - (largest >> 7), kLargestField);
  if (static_cast<int>(threadIdx.x % 4) == token / 2) factors[token % 2] = __uint_as_float((254u - field) << 23);
  return field << 23 | field << 7;
}

template <int WORDS>
__device__ __forceinline__ uint32_t largest_magnitudes(const uint32_t (&words)[WORDS]) {
  uint32_t largest = 0;
#pragma unroll
  for (int w = 0; w < WORDS; ++w) largest = __vmaxu2(largest, words[w] & 0x7fff7fffu);
  return largest;
}

__device__ __forceinline__ uint32_t to_half_pair(uint32_t pair, uint32_t factor) {
  const float2 wide = floats_of(multiply_pair(pair, factor));
  return pack<__half>(wide.x, wide.y);
}

// e4m3 rows, expanded exactly to fp16: one instruction for two weights, and Hopper has none to bf16.
struct Fp8Rows {
  static constexpr bool kIsTiled = false, kIsScaled = true;
  static constexpr int kChunk = 2048, kSlice = kChunk / 8, kFeatureBits = 8;
  static constexpr int kRowPitch = 2048 + 64, kSlotBytes = 8 * kRowPitch;
  static constexpr int kVectors = 8, kVectorWords = 4;
  static constexpr int kSpans = 4, kSpanFeatures = 64;

  static __device__ __forceinline__ int offset(int v, int j) { return v / 2 * kSpanFeatures + 16 * j + v % 2 * 8; }

  // Of bytes of a staged row: tokens whose rows begin in the same bank take other parts of it.
  static __device__ __forceinline__ int swizzle(int token) { return token % 2 * 16; }

  struct Operands {
    uint32_t pairs[kVectors][4];
    float factors[2];
    __device__ __forceinline__ void clear() {
      clear_words(pairs);
      factors[0] = factors[1] = 0.0f;
    }

    __device__ __forceinline__ void convert(const uint32_t (&from)[4], int token, uint32_t (&words)[4]) {
      const uint32_t factor = fit_token_to_half(largest_magnitudes(from), token, factors);
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = to_half_pair(from[w], factor);
    }

    __device__ __forceinline__ void read(uint32_t row, int swizzle) {
#pragma unroll
      for (int v = 0; v < 2 * kSpans; ++v) {
        const uint4 x = load_shared_16(row + v / 2 * 128 + threadIdx.x % 4 * 32 + (v % 2 * 16 ^ swizzle));
        pairs[v][0] = x.x, pairs[v][1] = x.y, pairs[v][2] = x.z, pairs[v][3] = x.w;
      }
    }

    __device__ __forceinline__ void finish() {}
    __device__ __forceinline__ void arrange(const Slice<Fp8Rows>& x) {
      const uint32_t factor = fit_to_half(x, factors);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int w = 0; w < 4; ++w) pairs[v][w] = to_half_pair(x.of[v][w], factor);
      }
    }
  };

  using Weights = RowWeights<kSpans>;

  static __device__ __forceinline__ void multiply(const Weights& w, const Operands& x, float (&sums)[4]) {
    float parts[4][4] = {};
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
      const uint4 top = w.top[span], bottom = w.bottom[span];
      const uint32_t words[4][2] = {{top.x, bottom.x}, {top.y, bottom.y}, {top.z, bottom.z}, {top.w, bottom.w}};
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        uint32_t a[4];
        widen_e4m3(words[step][0], a[0], a[2]);
        widen_e4m3(words[step][1], a[1], a[3]);
        const uint32_t(&pairs)[4] = x.pairs[2 * span + step / 2];
        multiply_add<__half>(parts[step], a, pairs[step % 2 * 2], pairs[step % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[e] += sum_of(parts, e) * x.factors[e % 2];
  }
};

// 4-bit codes in groups of 128, in the order of int4_layout.py. A nibble in the low bits of an fp16 is the subnormal
// code * 2^-24, which the tensor cores multiply exactly; four bits higher it is 16 times as much, and its activation a
// 16th: one logical operation for two codes. Zero points: (code - zero) x = code x - zero * (sum of x).
struct Int4Tiles {
  static constexpr bool kIsTiled = true, kIsScaled = true;
  static constexpr int kChunk = 2048, kSlice = kChunk / 8;
  static constexpr int kBlocks = 16, kBlockBytes = 1024, kWordBytes = 64, kWordOffset = kBlocks * kBlockBytes;
  static constexpr int kSlotBytes = kBlocks * (kBlockBytes + kWordBytes);
  static constexpr int kVectors = 16, kVectorWords = 2;   // a step of 32 features has two vectors
  static constexpr float kUnit = 16777216.0f;             // 2^24

  static __device__ __forceinline__ int offset(int v, int j) { return v / 2 * 32 + v % 2 * 16 + 4 * j; }

  // Of bytes of a staged row: tokens whose rows begin in the same bank take other parts of it.
  static __device__ __forceinline__ int swizzle(int token) { return token % 4 * 32; }

  struct Operands {
    uint32_t pairs[8][4];    // of a step: features 4 j + i and 16 + 4 j + i
    float sums[2][2];        // of the two blocks, of tokens 2 j + 0, 1
    float factors[2];
    __device__ __forceinline__ void clear() {
      clear_words(pairs);
      factors[0] = factors[1] = 0.0f;
    }

    // Of every second feature a 16th.
    __device__ __forceinline__ void convert(const uint32_t (&from)[4], int token, uint32_t (&words)[4]) {
      const uint32_t factor = fit_token_to_half(largest_magnitudes(from), token, factors) - 0x02000000u;
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = to_half_pair(from[w], factor);
    }

    __device__ __forceinline__ void read(uint32_t row, int swizzle) {
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        const uint32_t at = row + threadIdx.x % 4 * 8;
        const uint2 a = load_shared_8(at + (64 * step ^ swizzle)), b = load_shared_8(at + (64 * step + 32 ^ swizzle));
        pairs[step][0] = __byte_perm(a.x, b.x, 0x5410), pairs[step][1] = __byte_perm(a.x, b.x, 0x7632);
        pairs[step][2] = __byte_perm(a.y, b.y, 0x5410), pairs[step][3] = __byte_perm(a.y, b.y, 0x7632);
      }
    }

    __device__ __forceinline__ void finish() {
      const uint32_t ones[4] = {0x3C003C00u, 0x3C003C00u, 0x4C004C00u, 0x4C004C00u};   // 1, 1, 16, 16
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        float total[4] = {};
#pragma unroll
        for (int step = 4 * block; step < 4 * block + 4; ++step) {
          multiply_add<__half>(total, ones, pairs[step][0], pairs[step][1]);
          multiply_add<__half>(total, ones, pairs[step][2], pairs[step][3]);
        }
        sums[block][0] = total[0], sums[block][1] = total[1];
      }
    }

    __device__ __forceinline__ void arrange(const Slice<Int4Tiles>& x) {
      const uint32_t factor = fit_to_half(x, factors), sixteenth = factor - 0x02000200u;
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        const uint32_t(&a)[2] = x.of[2 * step], (&b)[2] = x.of[2 * step + 1];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          pairs[step][2 * i] = to_half_pair(__byte_perm(a[i], b[i], 0x5410), factor);
          pairs[step][2 * i + 1] = to_half_pair(__byte_perm(a[i], b[i], 0x7632), sixteenth);
        }
      }
      finish();
    }
  };

  struct Weights {
    uint2 codes[2][4];
    uint32_t upper[2], lower[2];   // scales and zero points of rows l / 4 and l / 4 + 8

    // codes, words: of the warp's first block in the slot; words at row l / 4.
    __device__ __forceinline__ void load(uint32_t from, uint32_t, uint32_t words) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        upper[block] = load_shared_4(words + block * kWordBytes), lower[block] = load_shared_4(words + block * kWordBytes + 32);
#pragma unroll
        for (int step = 0; step < 4; ++step) codes[block][step] = load_shared_8(from + block * kBlockBytes + step * 256);
      }
    }
  };

  static __device__ __forceinline__ void multiply(const Weights& w, const Operands& x, float (&sums)[4]) {
    float both[4] = {};
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      float parts[4][4] = {};
      const uint32_t upper = w.upper[block], lower = w.lower[block];
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        multiply_step(w.codes[block][step], x.pairs[4 * block + step], parts[step % 2 * 2], parts[step % 2 * 2 + 1]);
      }
      const float scale[2] = {scale_of(upper), scale_of(lower)};
      const float zero[2] = {static_cast<float>(upper >> 16), static_cast<float>(lower >> 16)};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float raw = sum_of(parts, e) * kUnit - zero[e / 2] * x.sums[block][e % 2];
        both[e] += scale[e / 2] * raw;
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[e] += both[e] * x.factors[e % 2];
  }

 private:
  static __device__ __forceinline__ float scale_of(uint32_t word) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(word & 0xffffu)));
  }

  static __device__ __forceinline__ void multiply_step(uint2 eight, const uint32_t (&x)[4], float (&even)[4], float (&odd)[4]) {
    const uint32_t a[4] = {eight.x & 0x000F000Fu, eight.y & 0x000F000Fu, eight.x & 0x00F000F0u, eight.y & 0x00F000F0u};
    multiply_add<__half>(even, a, x[0], x[1]);
    eight.x >>= 8, eight.y >>= 8;
    const uint32_t b[4] = {eight.x & 0x000F000Fu, eight.y & 0x000F000Fu, eight.x & 0x00F000F0u, eight.y & 0x00F000F0u};
    multiply_add<__half>(odd, b, x[2], x[3]);
  }
};

}  // namespace slipstream
