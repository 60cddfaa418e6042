// The converting warps of a CTA, for caches of 8 and 4 bits: raw tiles from the copy engine become fp16 operands, each
// value times its token's scale, in the swizzled slabs that the tensor cores read; rows past the sequence become zero.
#pragma once

#include "schedule/prefill_shape.cuh"

namespace slipstream {

// A token's scale as two factors: a scale too small for fp16's normal numbers is raised and the product lowered again.
struct TokenScale {
  __half2 first, second;

  __device__ __forceinline__ explicit TokenScale(float scale) {
    const bool is_small = fabsf(scale) < 1e-3f;  // of int4 it may be negative
    first = __float2half2_rn(is_small ? scale * 16384.0f : scale);
    second = __float2half2_rn(is_small ? 1.0f / 16384.0f : 1.0f);
  }
  __device__ __forceinline__ uint32_t multiply(__half2 pair) const {
    pair = __hmul2(__hmul2(pair, first), second);
    return *reinterpret_cast<uint32_t*>(&pair);
  }
};

// Sixteen values of one token, `words` of the cache, as eight pairs of fp16.
template <KvType KV>
__device__ __forceinline__ void convert_values(const uint32_t* words, float scale, uint32_t (&pairs)[8]) {
  const auto half2_of = [](uint32_t bits) { return *reinterpret_cast<__half2*>(&bits); };
  if constexpr (KV == KvType::kFp8E4m3) {
#pragma unroll
    for (int i = 0; i < 4; ++i) widen_e4m3(words[i], pairs[2 * i], pairs[2 * i + 1]);
  } else if constexpr (KV == KvType::kInt8) {
    const TokenScale factor(scale);
    const __half2 offset = __float2half2_rn(-1024.0f - 128.0f);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // 0x6400 | u is 1024 + u; u is the value plus 128.
      const uint32_t word = words[i / 2] ^ 0x80808080u;
      const uint32_t raised = __byte_perm(word, 0x64646464u, i % 2 == 0 ? 0x4140 : 0x4342);
      pairs[i] = factor.multiply(__hadd2(half2_of(raised), offset));
    }
  } else {
    const TokenScale factor(scale);
    // The low nibble u gives 1024 + u, the high one 1024 + 16 u; u is the value plus 8.
    const __half2 unit = __floats2half2_rn(1.0f, 0.0625f), offset = __floats2half2_rn(-1032.0f, -72.0f);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t both = __byte_perm(words[i / 4], 0, 0x4040 + i % 4 * 0x0101) & 0x00f0000fu;
      pairs[i] = factor.multiply(__hfma2(half2_of(both | 0x64006400u), unit, offset));
    }
  }
}

template <typename SHAPE>
struct PrefillConverter {
  using Words = std::conditional_t<SHAPE::kKvType == KvType::kInt4, uint2, uint4>;   // sixteen values
  // A warp takes eight rows at once, four lanes a row.
  static constexpr int kRounds = SHAPE::kKeys / 8 / SHAPE::kConverterWarps;

  PrefillMemory<SHAPE> memory;
  PipelineState<SHAPE::kStages> key_place, value_place;
  PipelineState<SHAPE::kRawStages> raw_place;
  PipelineState<2> slot;

  // Follows the loading warp, tile by tile in its order.
  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (Work work = memory.receive(slot); work.head >= 0; work = memory.receive(slot)) {
#pragma unroll 1
      for (int tile = work.end_tile - 1; tile >= work.begin_tile - 1; --tile) {
        if (tile >= work.begin_tile) {
          convert(work.seq_len - tile * SHAPE::kKeys, memory.keys(key_place.stage), memory.key_filled(key_place.stage),
                  memory.key_emptied(key_place.stage), key_place.parity);
          key_place.advance();
        }
        if (tile < work.end_tile - 1) {
          convert(work.seq_len - (tile + 1) * SHAPE::kKeys, memory.values(value_place.stage),
                  memory.value_filled(value_place.stage), memory.value_emptied(value_place.stage), value_place.parity);
          value_place.advance();
        }
      }
    }
  }

 private:
  // One tile, of which num_rows rows lie before the end of the sequence.
  __device__ __forceinline__ void convert(int num_rows, uint32_t to, uint32_t full, uint32_t empty, uint32_t parity) {
    wait_barrier(memory.raw_filled(raw_place.stage), raw_place.parity);
    wait_barrier(empty, parity ^ 1);
    const char* raw = memory.pointer(memory.raw(raw_place.stage));
    if (num_rows >= SHAPE::kKeys) convert_rows<true>(raw, memory.pointer(to), num_rows);
    else convert_rows<false>(raw, memory.pointer(to), num_rows);
    fence_shared_for_engines();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      arrive(full);
      arrive(memory.raw_emptied(raw_place.stage));
    }
    raw_place.advance();
  }

  // Eight neighbouring lanes take two rows of a slab: neither their reads nor their swizzled writes share banks.
  template <bool IS_WHOLE>
  static __device__ __forceinline__ void convert_rows(const char* raw, char* operand, int num_rows) {
    const int first_row = threadIdx.x % 128 / 32 * 8 * kRounds + threadIdx.x % 32 / 4, part = threadIdx.x % 4;
    const char* from = raw + first_row * SHAPE::kRawRowBytes + part * (SHAPE::kRawRowBytes / 4);
    const char* scales = raw + SHAPE::kScaleOffset + first_row * sizeof(float);
    char* row = operand + first_row * kSwizzleBytes;
    char* to[2] = {row + (2 * part ^ first_row % 8) * 16, row + ((2 * part + 1) ^ first_row % 8) * 16};
    // All reads first: the compiler must not move them over writes that might be to the same place.
    Words words[SHAPE::kSlabs * kRounds];
    float scale[kRounds];
#pragma unroll
    for (int i = 0; i < SHAPE::kSlabs * kRounds; ++i) {
      const int offset = i / kRounds * SHAPE::kRawSlab + i % kRounds * 8 * SHAPE::kRawRowBytes;
      words[i] = *reinterpret_cast<const Words*>(from + offset);
    }
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      scale[i] = SHAPE::kHasTokenScales ? *reinterpret_cast<const float*>(scales + 8 * i * sizeof(float)) : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < SHAPE::kSlabs * kRounds; ++i) {
      uint32_t pairs[8] = {};
      if (IS_WHOLE || first_row + i % kRounds * 8 < num_rows) {
        convert_values<SHAPE::kKvType>(reinterpret_cast<const uint32_t*>(&words[i]), scale[i % kRounds], pairs);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<uint4*>(to[half] + i / kRounds * SHAPE::kKeySlab + i % kRounds * 8 * kSwizzleBytes) =
            make_uint4(pairs[4 * half], pairs[4 * half + 1], pairs[4 * half + 2], pairs[4 * half + 3]);
      }
    }
  }
};

}  // namespace slipstream
