// Rows gathered into the tiles that products with records read, quantised on the way.
#pragma once

#include <cuda_fp8.h>

#include "formats/numbers.cuh"
#include "schedule/record_shape.cuh"

namespace slipstream {

// Where a row of the routing stands: tile, and row of it. By one warp.
struct RowPlace {
  int tile, row;
};

__device__ __forceinline__ void find_row(const ExpertParams& p, int tile_rows, int row, RowPlace* found) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int first = 0; first < p.num_experts; first += 32) {
    const bool exists = first + lane < p.num_experts;
    const int begin = exists ? __ldcg(p.offsets + first + lane) : 0, end = exists ? __ldcg(p.offsets + first + lane + 1) : 0;
    const int tiles = (end - begin + tile_rows - 1) / tile_rows;
    int until = tiles;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, until, distance);
      if (lane >= distance) until += other;
    }
    if (begin <= row && row < end) *found = {before + until - tiles + (row - begin) / tile_rows, (row - begin) % tile_rows};
    before += __shfl_sync(~0u, until, 31);
  }
}

// Eight features of a row, as fp32.
template <typename IN>
struct Eight {
  float of[8];

  __device__ __forceinline__ explicit Eight(const IN* from) {
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

  __device__ __forceinline__ float largest() const {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(of[i]));
    return most;
  }

  // Scaled and rounded; `of` becomes what that stands for.
  __device__ __forceinline__ uint2 round(float factor) {
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_fp8x2_storage_t two = __nv_cvt_float2_to_fp8x2({of[2 * i] * factor, of[2 * i + 1] * factor}, __NV_SATFINITE, __NV_E4M3);
      reinterpret_cast<__nv_fp8x2_storage_t*>(words)[i] = two;
      const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3);
      of[2 * i] = __half2float(__ushort_as_half(pair.x)), of[2 * i + 1] = __half2float(__ushort_as_half(pair.y));
    }
    return make_uint2(words[0], words[1]);
  }
};

// The largest of all threads' numbers.
template <int THREADS>
__device__ __forceinline__ float largest_of_block(float mine, float (&of_warps)[THREADS / 32]) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) mine = fmaxf(mine, __shfl_xor_sync(~0u, mine, distance));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
  __syncthreads();
  float most = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < THREADS / 32; ++warp) most = fmaxf(most, of_warps[warp]);
  return most;
}

// As core matrices of eight rows x 16 bytes, an operand of the products with zero points.
template <typename SHAPE>
__device__ __forceinline__ void put_total(const GatheredTiles<SHAPE>& tiles, const RowPlace& place, int block, float total) {
  __half* to = reinterpret_cast<__half*>(tiles.totals(place.tile, block) + place.row * 16) + block % 8;
  to[0] = __float2half_rn(total);
  to[SHAPE::kColumns * 8] = __float2half_rn(total - __half2float(to[0]));
}

// One CTA a row: quantised by its largest magnitude (ops.quantize_fp8) unless it is e4m3 already, into its tile, and
// totals of its blocks. Rows that a tile has beyond are whatever was there: no product mixes rows.
template <typename SHAPE, typename IN, int THREADS>
__device__ __forceinline__ void gather_row(const ExpertParams& p, const RowPlace& place, float (&of_warps)[THREADS / 32]) {
  const GatheredTiles<SHAPE> tiles(p);
  const int64_t source = p.tokens != nullptr ? __ldcg(p.tokens + blockIdx.x) : static_cast<int>(blockIdx.x);
  const IN* from = static_cast<const IN*>(p.x) + source * p.x_row_stride;
  const int eights = p.in_features / 8;
  float factor = 1.0f, scale = 1.0f;
  if constexpr (sizeof(IN) == 1) {
    if (p.x_scale != nullptr) scale = __ldcg(p.x_scale + source);
  } else {
    float largest = 1e-30f;   // of a row of zeros
#pragma unroll 4
    for (int i = threadIdx.x; i < eights; i += THREADS) largest = fmaxf(largest, Eight<IN>(from + 8 * i).largest());
    largest = largest_of_block<THREADS>(largest, of_warps);
    factor = 448.0f / largest, scale = largest / 448.0f;
  }
  if (threadIdx.x == 0) p.tile_scale[place.tile * SHAPE::kColumns + place.row] = scale;
#pragma unroll 4
  for (int i = threadIdx.x; i < eights; i += THREADS) {
    const int block = i / 16, half_piece = i % 16;
    Eight<IN> eight(from + 8 * i);
    const uint2 rounded = eight.round(factor);
    char* to = tiles.rows(place.tile, block) + place.row * 128 + ((half_piece / 2 ^ place.row % 8) << 4) + half_piece % 2 * 8;
    *reinterpret_cast<uint2*>(to) = rounded;
    float total = 0.0f;
#pragma unroll
    for (int e = 0; e < 8; ++e) total += eight.of[e];
#pragma unroll
    for (int distance = 1; distance < 16; distance *= 2) {
      total += __shfl_xor_sync(0xFFFFu << (threadIdx.x & 16), total, distance);
    }
    if (half_piece != 0) continue;
    put_total<SHAPE>(tiles, place, block, total);
    for (int absent = tiles.blocks; block + 1 == tiles.blocks && absent % 8 != 0; ++absent) {
      put_total<SHAPE>(tiles, place, absent, 0.0f);
    }
  }
}

}  // namespace slipstream
