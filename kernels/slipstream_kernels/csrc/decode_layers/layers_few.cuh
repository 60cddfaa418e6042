// Activations of one to four tokens on their way from memory to operands.
#pragma once

#include "decode_layers/layers_product.cuh"

namespace slipstream {

constexpr int kFewTokens = 4;

// A lane's features of some chunks of one row: consecutive ones of the warp's slice of each.
template <typename FORMAT, int CHUNKS>
struct RowVectors {
  static constexpr int kFeatures = FORMAT::kSlice / 32, kWords = kFeatures / 2;
  uint32_t of[CHUNKS][kWords];

  // CAN_CHANGE: other CTAs write it in this kernel. What does not exist is zeros.
  template <bool CAN_CHANGE>
  __device__ __forceinline__ void load_chunk(int chunk, const __nv_bfloat16* at, bool exists) {
    if constexpr (kWords == 4) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (exists) x = CAN_CHANGE ? load_l2_16(at) : __ldg(reinterpret_cast<const uint4*>(at));
      of[chunk][0] = x.x, of[chunk][1] = x.y, of[chunk][2] = x.z, of[chunk][3] = x.w;
    } else {
      uint2 x = make_uint2(0, 0);
      if (exists) x = CAN_CHANGE ? load_l2_8(at) : __ldg(reinterpret_cast<const uint2*>(at));
      of[chunk][0] = x.x, of[chunk][1] = x.y;
    }
  }
};

// The rows of up to four tokens, each lane with features of all of them: what tokens there are not costs nothing, where
// RawRows takes as long for one as for eight. Slices past a row's end are zeros.
template <typename FORMAT>
struct FewRows {
  static constexpr int kChunks = HeldRows<FORMAT>::kChunks;
  using Vectors = RowVectors<FORMAT, kChunks>;
  Vectors tokens[kFewTokens];

  __device__ __forceinline__ void load(const Consumer<FORMAT>& c, const __nv_bfloat16* rows, int features) {
    const __nv_bfloat16* from = rows + first_feature(c, 0) + c.lane * Vectors::kFeatures;
#pragma unroll
    for (int token = 0; token < kFewTokens; ++token) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const bool exists = token < c.p.num_tokens && first_feature(c, chunk) < features;
        tokens[token].template load_chunk<true>(chunk, from + chunk * FORMAT::kChunk, exists);
      }
      from += features;
    }
  }

  static __device__ __forceinline__ void load_norm(const Consumer<FORMAT>& c, const void* norm, int features,
                                                   Vectors& weight) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int at = first_feature(c, chunk) + c.lane * Vectors::kFeatures;
      weight.template load_chunk<false>(chunk, static_cast<const __nv_bfloat16*>(norm) + at, at < features);
    }
  }

  // rms_norm in place, with the rounding steps of ops.rms_norm. weight: the same features of the norm's weight.
  __device__ __forceinline__ void normalise(const Consumer<FORMAT>& c, const Vectors& weight, int features) {
    float* sums = c.memory.norms();   // [token][warp]
#pragma unroll
    for (int token = 0; token < kFewTokens; ++token) {
      if (token >= c.p.num_tokens) break;
      float sum = 0.0f;
      for_pairs(token, [&](uint32_t& pair, int, int) {
        const float2 x = floats_of(pair);
        sum += x.x * x.x + x.y * x.y;
      });
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      if (c.lane == 0) sums[token * Consumer<FORMAT>::Shape::kWarps + c.warp] = sum;
    }
    c.sync();
#pragma unroll
    for (int token = 0; token < kFewTokens; ++token) {
      if (token >= c.p.num_tokens) break;
      float total = 0.0f;
#pragma unroll
      for (int warp = 0; warp < Consumer<FORMAT>::Shape::kWarps; ++warp) {
        total += sums[token * Consumer<FORMAT>::Shape::kWarps + warp];
      }
      const float factor = rsqrtf(total / static_cast<float>(features) + c.p.eps);
      for_pairs(token, [&](uint32_t& pair, int chunk, int w) {
        forget(pair);
        const float2 x = floats_of(pair), scale = floats_of(weight.of[chunk][w]);
        const float2 rounded = floats_of(pack<__nv_bfloat16>(x.x * factor, x.y * factor));
        pair = pack<__nv_bfloat16>(rounded.x * scale.x, rounded.y * scale.y);
      });
    }
  }

  // As operands, through 2 KB of shared memory that this warp has for itself.
  __device__ __forceinline__ void arrange(const Consumer<FORMAT>& c, HeldRows<FORMAT>& held) const {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) arrange_chunk(c, chunk, held.of[chunk]);
  }

 private:
  static constexpr int kRowBytes = FORMAT::kSlice * 2;

  __device__ __forceinline__ void arrange_chunk(const Consumer<FORMAT>& c, int chunk, typename FORMAT::Operands& operands) const {
    char* const staging = reinterpret_cast<char*>(c.memory.exchange()) + c.warp * kFewTokens * kRowBytes;
    const int mine = c.lane / 4;   // token
    operands.clear();
#pragma unroll
    for (int token = 0; token < kFewTokens; ++token) {
      if (token >= c.p.num_tokens) break;
      uint32_t words[Vectors::kWords];
      operands.convert(tokens[token].of[chunk], token, words);
      char* const to = staging + token * kRowBytes + (c.lane * 2 * Vectors::kFeatures ^ FORMAT::swizzle(token));
      if constexpr (Vectors::kWords == 4) {
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
      } else {
        *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
      }
    }
    __syncwarp();
    if (mine < c.p.num_tokens) operands.read(shared_address(staging) + mine * kRowBytes, FORMAT::swizzle(mine));
    __syncwarp();
    operands.finish();
  }

  template <typename USE>
  __device__ __forceinline__ void for_pairs(int token, USE use) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int w = 0; w < Vectors::kWords; ++w) use(tokens[token].of[chunk][w], chunk, w);
    }
  }
};

}  // namespace slipstream
