// A warpgroup's 64 rows of queries in shared memory, from their own type to that of the product, where they lie: slabs
// of 64 columns under the 128-byte swizzle.
#pragma once

#include "formats/pack_e4m3.cuh"
#include "mma/hopper_mma.cuh"
#include "mma/warp_mma.cuh"

namespace slipstream {

constexpr float kMaxE4m3 = 448.0f;

// From bf16 to fp16.  QUERY_SLAB: bytes from one slab to the next.
template <int QUERY_SLAB, int SLABS>
__device__ __forceinline__ void queries_to_half(char* rows) {
  for (int i = threadIdx.x % 128; i < 64 * 8 * SLABS; i += 128) {
    const int slab = i / (64 * 8), part = i % (64 * 8);
    auto* words = reinterpret_cast<uint4*>(rows + slab * QUERY_SLAB + part * 16);
    const uint4 old = *words;
    const auto convert = [](uint32_t pair) {
      return pack<__half>(__uint_as_float(pair << 16), __uint_as_float(pair & ~0xffffu));
    };
    *words = make_uint4(convert(old.x), convert(old.y), convert(old.z), convert(old.w));
  }
}

// Of 128 columns, to e4m3 in the first slab, each row by its largest; unit: of the two rows whose scores this thread
// has, what a stored 1 stands for.  A quad takes these two rows, its lane q the q-th and (q + 4)-th 16 bytes of each
// slab, and reads all that it has of a row before it writes.
template <typename T, int QUERY_SLAB>
__device__ __forceinline__ void round_queries(char* rows, float (&unit)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r, lane = threadIdx.x % 4;
    char* begin = rows + row * kSwizzleBytes;
    uint32_t words[4][4];  // of 16-byte units lane, lane + 4 of slab 0, then of slab 1
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int place = (lane + i % 2 * 4) ^ row % 8;
      const uint4 read = *reinterpret_cast<const uint4*>(begin + i / 2 * QUERY_SLAB + place * 16);
      words[i][0] = read.x, words[i][1] = read.y, words[i][2] = read.z, words[i][3] = read.w;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = unpack<T>(words[i][j]);
        largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    unit[r] = fmaxf(largest, 1e-30f) / kMaxE4m3;
    const float inverse = 1.0f / unit[r];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t packed[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 low = unpack<T>(words[i][2 * j]), high = unpack<T>(words[i][2 * j + 1]);
        packed[j] = pack_e4m3(make_float2(low.x * inverse, low.y * inverse),
                              make_float2(high.x * inverse, high.y * inverse));
      }
      // Eight values: half of the 16 bytes of twice as many columns.
      const int unit_index = lane + 4 * i, place = (unit_index / 2) ^ row % 8;
      *reinterpret_cast<uint2*>(begin + place * 16 + unit_index % 2 * 8) = make_uint2(packed[0], packed[1]);
    }
  }
}

}  // namespace slipstream
