// Sums over the lanes of a warp.
#pragma once

namespace slipstream {

// The sum of the values of this lane and those before it. All 32 lanes.
template <typename T>
__device__ __forceinline__ T inclusive_sum(T value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T before = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += before;
  }
  return value;
}

}  // namespace slipstream
