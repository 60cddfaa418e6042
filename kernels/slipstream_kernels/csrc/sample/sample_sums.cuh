// Sums and least values over a CTA, one barrier each.  Masses are fixed-point numbers: exact in any order of addition,
// and the hardware adds a warp's integers in one instruction (redux).
#pragma once

#include <cstdint>

namespace slipstream {

constexpr int kSampleThreads = 512;
constexpr int kSampleWarps = kSampleThreads / 32;
constexpr uint32_t kAllLanes = ~0u;

// A share of 1 of the mass of the most likely token; 2048 tokens have at most 2^51.
constexpr float kMassUnit = 1099511627776.0f;  // 2^40
constexpr int kLowMassBits = 26;

// 32 lanes' masses, together below 2^52.
__device__ __forceinline__ uint64_t add_over_warp(uint64_t mass) {
  const uint32_t low = __reduce_add_sync(kAllLanes, static_cast<uint32_t>(mass) & ((1u << kLowMassBits) - 1));
  const uint32_t high = __reduce_add_sync(kAllLanes, static_cast<uint32_t>(mass >> kLowMassBits));
  return (static_cast<uint64_t>(high) << kLowMassBits) + low;
}

__device__ __forceinline__ uint64_t least_over_warp(uint64_t value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = min(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

__device__ __forceinline__ double add_over_warp(double value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

struct MassAndCount {
  uint64_t mass;
  uint32_t count;
};

// Each call is made by all threads, which all get the result.  Two buffers in turn: a second barrier is not needed.
struct BlockSums {
  MassAndCount (*parts)[kSampleWarps];  // [2]
  int turn = 0;

  __device__ __forceinline__ MassAndCount swap(MassAndCount of_warp, MassAndCount neutral) {
    if (threadIdx.x % 32 == 0) parts[turn][threadIdx.x / 32] = of_warp;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const MassAndCount part = lane < kSampleWarps ? parts[turn][lane] : neutral;
    turn ^= 1;
    return part;
  }

  __device__ __forceinline__ uint32_t count(uint32_t mine) {
    return __reduce_add_sync(kAllLanes, swap({0, __reduce_add_sync(kAllLanes, mine)}, {0, 0}).count);
  }

  __device__ __forceinline__ MassAndCount add(MassAndCount mine) {
    const MassAndCount of_warp{add_over_warp(mine.mass), __reduce_add_sync(kAllLanes, mine.count)};
    const MassAndCount part = swap(of_warp, {0, 0});
    return {add_over_warp(part.mass), __reduce_add_sync(kAllLanes, part.count)};
  }

  __device__ __forceinline__ uint64_t least(uint64_t mine) {
    return least_over_warp(swap({least_over_warp(mine), 0}, {~uint64_t{0}, 0}).mass);
  }

  __device__ __forceinline__ double add(double mine) {
    const double of_warp = add_over_warp(mine);
    const MassAndCount part = swap({static_cast<uint64_t>(__double_as_longlong(of_warp)), 0}, {0, 0});
    return add_over_warp(__longlong_as_double(static_cast<long long>(part.mass)));
  }
};

}  // namespace slipstream
