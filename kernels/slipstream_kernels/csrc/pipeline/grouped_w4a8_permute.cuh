// The kernel before the GEMM: permutes the rows into tiles of tokens and quantises them.
#pragma once

#include <cuda_fp8.h>

#include "formats/numbers.cuh"
#include "ptx/warp_scan.cuh"
#include "schedule/grouped_w4a8_shape.cuh"

namespace slipstream {

// The position of a row of the routing: a tile of tokens, and the row in it.
struct PermutedRow {
  int token_tile, row;
};

// By one warp.
__device__ __forceinline__ void find_permuted_row(const GroupedGemmParams& p, int tile_rows, int row, PermutedRow* found) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int first = 0; first < p.num_experts; first += 32) {
    const bool exists = first + lane < p.num_experts;
    const int begin = exists ? __ldcg(p.offsets + first + lane) : 0, end = exists ? __ldcg(p.offsets + first + lane + 1) : 0;
    const int token_tiles = (end - begin + tile_rows - 1) / tile_rows;
    const int until = inclusive_sum(token_tiles);
    if (begin <= row && row < end) {
      *found = {before + until - token_tiles + (row - begin) / tile_rows, (row - begin) % tile_rows};
    }
    before += __shfl_sync(~0u, until, 31);
  }
}

// Eight features of a row, as fp32.
template <typename IN>
struct Features8 {
  float of[8];

  __device__ __forceinline__ explicit Features8(const IN* from) {
    if constexpr (sizeof(IN) == 1) {
      const uint2 v = load_global_8(from);
      uint32_t pairs[4];
      widen_e4m3(v.x, pairs[0], pairs[1]), widen_e4m3(v.y, pairs[2], pairs[3]);
      const __half* halves = reinterpret_cast<const __half*>(pairs);
#pragma unroll
      for (int i = 0; i < 8; ++i) of[i] = to_float(halves[i]);
    } else {
      const uint4 v = load_global_16(from);
      const IN* values = reinterpret_cast<const IN*>(&v);
#pragma unroll
      for (int i = 0; i < 8; ++i) of[i] = to_float(values[i]);
    }
  }

  __device__ __forceinline__ float amax() const {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(of[i]));
    return amax;
  }

  // The e4m3 values of the features times factor; sets `of` to these values.
  __device__ __forceinline__ uint2 round(float factor) {
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 scaled = {of[2 * i] * factor, of[2 * i + 1] * factor};
      const __nv_fp8x2_storage_t two = __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
      reinterpret_cast<__nv_fp8x2_storage_t*>(words)[i] = two;
      const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3);
      of[2 * i] = __half2float(__ushort_as_half(pair.x)), of[2 * i + 1] = __half2float(__ushort_as_half(pair.y));
    }
    return make_uint2(words[0], words[1]);
  }
};

// The largest value of all threads.
template <int THREADS>
__device__ __forceinline__ float block_max(float mine, float (&of_warps)[THREADS / 32]) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) mine = fmaxf(mine, __shfl_xor_sync(~0u, mine, distance));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
  __syncthreads();
  float largest = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < THREADS / 32; ++warp) largest = fmaxf(largest, of_warps[warp]);
  return largest;
}

// Stores a block's sum as two fp16 (the rounded sum, the rest) in core matrices of 8 rows x 16 bytes: the B operand of the
// products with zero points.
template <typename SHAPE>
__device__ __forceinline__ void store_activation_sum(const PermutedX<SHAPE>& permuted, const PermutedRow& row, int block,
                                                     float sum) {
  __half* to = reinterpret_cast<__half*>(permuted.activation_sums(row.token_tile, block) + row.row * 16) + block % 8;
  to[0] = __float2half_rn(sum);
  to[SHAPE::kColumns * 8] = __float2half_rn(sum - __half2float(to[0]));
}

// One CTA a row. Quantises it by its largest magnitude as ops.quantize_fp8 does (e4m3 rows stay as they are), and writes it
// and the sums of its blocks into its tile of tokens. Missing rows of a tile stay unwritten: no product mixes rows.
template <typename SHAPE, typename IN, int THREADS>
__device__ __forceinline__ void permute_row(const GroupedGemmParams& p, const PermutedRow& row, float (&of_warps)[THREADS / 32]) {
  const PermutedX<SHAPE> permuted(p);
  const int64_t source = p.tokens != nullptr ? __ldcg(p.tokens + blockIdx.x) : static_cast<int>(blockIdx.x);
  const IN* from = static_cast<const IN*>(p.x) + source * p.x_row_stride;
  const int num_vectors = p.in_features / 8;
  float factor = 1.0f, scale = 1.0f;
  if constexpr (sizeof(IN) == 1) {
    if (p.x_scale != nullptr) scale = __ldcg(p.x_scale + source);
  } else {
    float amax = 1e-30f;   // at least: a row of zeros gets a scale, too
#pragma unroll 4
    for (int i = threadIdx.x; i < num_vectors; i += THREADS) amax = fmaxf(amax, Features8<IN>(from + 8 * i).amax());
    amax = block_max<THREADS>(amax, of_warps);
    factor = 448.0f / amax, scale = amax / 448.0f;
  }
  if (threadIdx.x == 0) p.row_scale[row.token_tile * SHAPE::kColumns + row.row] = scale;
#pragma unroll 4
  for (int i = threadIdx.x; i < num_vectors; i += THREADS) {
    const int block = i / 16, vector = i % 16;   // of 8 bytes; two are a swizzled chunk
    Features8<IN> features(from + 8 * i);
    const uint2 rounded = features.round(factor);
    char* to = permuted.rows(row.token_tile, block) + row.row * 128 + ((vector / 2 ^ row.row % 8) << 4) + vector % 2 * 8;
    *reinterpret_cast<uint2*>(to) = rounded;
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += features.of[e];
#pragma unroll
    for (int distance = 1; distance < 16; distance *= 2) {
      sum += __shfl_xor_sync(0xFFFFu << (threadIdx.x & 16), sum, distance);
    }
    if (vector != 0) continue;
    store_activation_sum<SHAPE>(permuted, row, block, sum);
    for (int absent = permuted.blocks; block + 1 == permuted.blocks && absent % 8 != 0; ++absent) {
      store_activation_sum<SHAPE>(permuted, row, absent, 0.0f);
    }
  }
}

}  // namespace slipstream
