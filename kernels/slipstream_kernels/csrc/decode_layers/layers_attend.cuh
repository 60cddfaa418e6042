// The consumer warps in the attention of a layer: one query token of each request over its paged keys, which come through
// the ring in pieces. Heads of 128. Keys are the 16-row side of the products, the query heads of a kv head the 8-wide one.
//
// A piece has tiles of 16 tokens, and 8 warps: kParts of them take one tile, all its scores and each some dims of its
// values. Token k of a tile lies in run k % 8 / 2 of the piece: the four runs begin in other banks (layers_shape.cuh).
#pragma once

#include "decode_layers/layers_product.cuh"

namespace slipstream {

constexpr float kNoMaximum = -1e30f;   // that no score reaches, and exp2(maximum - maximum) is 1

template <typename FORMAT, int KV_BYTES>
struct AttentionShape {
  using Ring = LayersShape<FORMAT>;
  using Operand = typename std::conditional<KV_BYTES == 1, __half, __nv_bfloat16>::type;
  static constexpr int kRowBytes = kHeadDim * KV_BYTES, kRunTokens = Ring::kCopyBytes / kRowBytes;
  static constexpr int kPieceTokens = 4 * kRunTokens, kTiles = kPieceTokens / 16;
  static constexpr int kParts = Ring::kWarps / kTiles, kProducts = 16 / kParts / 2;
  static_assert(kTiles * 8 * kHeadDim * 4 <= Ring::kExchangeBytes);

  // The four dims of a lane in step 0..7 of the products with keys; those 64 further are step + 4.
  static __device__ __forceinline__ int query_dim(int step, int j) {
    return KV_BYTES == 1 ? step / 4 * 64 + 16 * j + step % 4 * 4 : step / 2 * 32 + 8 * j + step % 2 * 4;
  }
  static __device__ __forceinline__ int token_of(int run, int tile, int index) { return run * kRunTokens + 4 * tile + index; }
};

// Four elements of a head and the four that are 64 further, rotated by the token's angles and rounded to bf16.
// Source: RoFormer, arXiv:2104.09864.
__device__ __forceinline__ void rotate(const __nv_bfloat16* head, const float* angles, int dim, uint32_t (&low)[2],
                                     uint32_t (&high)[2]) {
  const uint2 first = load_l2_8(head + dim), second = load_l2_8(head + dim + 64);
  const uint32_t a[2] = {first.x, first.y}, b[2] = {second.x, second.y};
  const float4 cosines = *reinterpret_cast<const float4*>(angles + dim);
  const float4 sines = *reinterpret_cast<const float4*>(angles + 64 + dim);
  const float c[4] = {cosines.x, cosines.y, cosines.z, cosines.w}, s[4] = {sines.x, sines.y, sines.z, sines.w};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 x = floats_of(a[i]), y = floats_of(b[i]);
    low[i] = pack<__nv_bfloat16>(x.x * c[2 * i] - y.x * s[2 * i], x.y * c[2 * i + 1] - y.y * s[2 * i + 1]);
    high[i] = pack<__nv_bfloat16>(y.x * c[2 * i] + x.x * s[2 * i], y.y * c[2 * i + 1] + x.y * s[2 * i + 1]);
  }
}

// The query heads of a unit as operands: lane l has head l / 4.
template <typename SHAPE>
struct Queries {
  uint32_t pairs[8][2];

  // angles: of the request's token, in shared memory.
  __device__ __forceinline__ void load(const LayersParams& p, const KeyUnit& unit, const float* angles) {
    const int row = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
    const auto* head = static_cast<const __nv_bfloat16*>(p.heads) + int64_t{unit.request} * p.qkv_size +
                       (unit.head * p.group + row) * kHeadDim;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t low[2] = {0, 0}, high[2] = {0, 0};
      if (row < p.group) rotate(head, angles, SHAPE::query_dim(step, j), low, high);
#pragma unroll
      for (int i = 0; i < 2; ++i) pairs[step][i] = operand(low[i]), pairs[step + 4][i] = operand(high[i]);
    }
  }

 private:
  static __device__ __forceinline__ uint32_t operand(uint32_t pair) {
    if constexpr (__is_same(typename SHAPE::Operand, __nv_bfloat16)) return pair;
    const float2 wide = floats_of(pair);
    return pack<__half>(wide.x, wide.y);
  }
};

// A warp's running softmax (base 2) of its tiles: rows 2 j + 0, 1 of the unit, and its dims of the output.
template <typename SHAPE>
struct WarpState {
  float maximum[2], normaliser[2], out[SHAPE::kProducts][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int e = 0; e < 2; ++e) maximum[e] = kNoMaximum, normaliser[e] = 0.0f;
#pragma unroll
    for (int product = 0; product < SHAPE::kProducts; ++product) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[product][e] = 0.0f;
    }
  }

  // Scores to probabilities, under the maximum that now is.
  __device__ __forceinline__ void follow(float (&scores)[4]) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float highest = fmaxf(maximum[e], fmaxf(scores[e], scores[e + 2]));
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, distance));
      }
      const float rescale = exp2_fast(maximum[e] - highest);
      maximum[e] = highest;
      normaliser[e] *= rescale;
#pragma unroll
      for (int product = 0; product < SHAPE::kProducts; ++product) {
        out[product][e] *= rescale, out[product][e + 2] *= rescale;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scores[2 * half + e] = exp2_fast(scores[2 * half + e] - highest);
        normaliser[e] += scores[2 * half + e];
      }
    }
  }
};

// One tile of 16 tokens by one warp.
template <typename SHAPE, int KV_BYTES>
struct KeyTile {
  static constexpr int kValueOffset = SHAPE::Ring::kValueOffset, kPitch = SHAPE::Ring::kCopyPitch;
  uint32_t slot;       // shared address
  int tile, part;      // of the piece; of the tile's warps
  int num_valid;       // tokens of the piece
  int i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;

  __device__ __forceinline__ void attend(const Queries<SHAPE>& queries, float scale, WarpState<SHAPE>& state) const {
    float scores[4] = {};
    multiply_keys(queries, scores);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool is_valid = SHAPE::token_of(i / 2, tile, i % 2 + e / 2 * 2) < num_valid;
      scores[e] = is_valid ? scores[e] * scale : -INFINITY;
    }
    state.follow(scores);
    using Operand = typename SHAPE::Operand;
    const uint32_t low = transpose_8x8(pack<Operand>(scores[0], scores[1]));
    const uint32_t high = transpose_8x8(pack<Operand>(scores[2], scores[3]));
    multiply_values(low, high, state);
  }

 private:
  __device__ __forceinline__ void multiply_keys(const Queries<SHAPE>& queries, float (&scores)[4]) const {
    const uint32_t row = slot + i / 2 * kPitch + (4 * tile + i % 2) * SHAPE::kRowBytes + 16 * j;
    float parts[2][4] = {};
#pragma unroll
    for (int column = 0; column < 2 * KV_BYTES; ++column) {
      const uint4 top = load_shared_16(row + 64 * column), bottom = load_shared_16(row + 2 * SHAPE::kRowBytes + 64 * column);
      const uint32_t words[4][2] = {{top.x, bottom.x}, {top.y, bottom.y}, {top.z, bottom.z}, {top.w, bottom.w}};
#pragma unroll
      for (int word = 0; word < 4; word += KV_BYTES) {
        const int step = (4 * column + word) / KV_BYTES;
        uint32_t a[4];
        if constexpr (KV_BYTES == 1) {
          widen_e4m3(words[word][0], a[0], a[2]);
          widen_e4m3(words[word][1], a[1], a[3]);
        } else {
          a[0] = words[word][0], a[1] = words[word][1], a[2] = words[word + 1][0], a[3] = words[word + 1][1];
        }
        multiply_add<typename SHAPE::Operand>(parts[step % 2], a, queries.pairs[step][0], queries.pairs[step][1]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[e] = parts[0][e] + parts[1][e];
  }

  // Eight bytes of four tokens: a lane's dims. What lies past the sequence may be NaN, which a probability of 0 does not
  // silence: zeros.
  __device__ __forceinline__ void multiply_values(uint32_t low, uint32_t high, WarpState<SHAPE>& state) const {
    const uint32_t row = slot + kValueOffset + j * kPitch + 4 * tile * SHAPE::kRowBytes + 64 * part + 8 * i;
    uint32_t words[4][2];
#pragma unroll
    for (int token = 0; token < 4; ++token) {
      const uint2 loaded = load_shared_8(row + token * SHAPE::kRowBytes);
      const bool is_valid = SHAPE::token_of(j, tile, token) < num_valid;
      words[token][0] = is_valid ? loaded.x : 0, words[token][1] = is_valid ? loaded.y : 0;
    }
#pragma unroll
    for (int product = 0; product < SHAPE::kProducts; ++product) {
      uint32_t a[4];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        if constexpr (KV_BYTES == 1) {
          const uint32_t two = __byte_perm(words[2 * pair][product / 2], words[2 * pair + 1][product / 2],
                                           product % 2 == 0 ? 0x5140 : 0x7362);
          widen_e4m3(two, a[2 * pair], a[2 * pair + 1]);
        } else {
          a[2 * pair] = __byte_perm(words[2 * pair][product], words[2 * pair + 1][product], 0x5410);
          a[2 * pair + 1] = __byte_perm(words[2 * pair][product], words[2 * pair + 1][product], 0x7632);
        }
      }
      multiply_add<typename SHAPE::Operand>(state.out[product], a, low, high);
    }
  }
};

}  // namespace slipstream
