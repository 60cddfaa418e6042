// Sums over the requests of a batch, read from their lengths on the device.
#pragma once

#include "ptx/warp_scan.cuh"

namespace slipstream {

// Fills ends[request] with cost(0) + .. + cost(request).  All THREADS of the CTA; ends with a barrier.
// warp_sums: shared, THREADS / 32.
template <int THREADS, typename COST>
__device__ __forceinline__ void sum_over_requests(int num_requests, int* ends, int* warp_sums, COST cost) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;
  for (int first = 0; first < num_requests; first += THREADS) {
    const int request = first + threadIdx.x;
    int sum = inclusive_sum(request < num_requests ? cost(request) : 0);
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int total = 0;
    for (int other = 0; other < THREADS / 32; ++other) {
      if (other < warp) sum += warp_sums[other];
      total += warp_sums[other];
    }
    if (request < num_requests) ends[request] = before + sum;
    before += total;
    __syncthreads();
  }
}

// The first request whose end lies beyond `place`; num_requests if none does.
__device__ __forceinline__ int find_request(const int* ends, int num_requests, int place) {
  int low = 0, high = num_requests;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] <= place) low = middle + 1;
    else high = middle;
  }
  return low;
}

}  // namespace slipstream
