// The two kernels of the grouped GEMM with 4-bit weights on warpgroup products, and their launches.
#pragma once

#include "host/kernel_launch.h"
#include "mma/grouped_wide_multiply.cuh"
#include "ptx/dependent_launch.cuh"

namespace slipstream {

constexpr int kPermutingWarps = 8;   // of a CTA

template <typename SHAPE>
__global__ void __launch_bounds__(32 * kPermutingWarps) grouped_wide_permute_kernel(const __grid_constant__ GroupedGemmParams p) {
  start_dependents();
  await_previous();
  using Permutation = WideRowPermutation<SHAPE>;
  const int group = blockIdx.y * kPermutingWarps + threadIdx.x / 32;
  if (group < p.max_token_tiles * Permutation::kGroups) Permutation{p}.run(group, blockIdx.x * Permutation::kWarpUnits);
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, SHAPE::kCtas)
    grouped_wide_kernel(const __grid_constant__ GroupedGemmParams p) {
  extern __shared__ __align__(1024) char memory[];
  start_dependents();
  await_previous();
  multiply_grouped_wide<SHAPE>(p, blockIdx.x, blockIdx.y, memory);
}

// permuted_x: max_token_tiles * kTileRows rows of whole units of input features.
template <typename SHAPE>
cudaError_t launch_grouped_wide(const GroupedGemmParams& p, cudaStream_t stream) {
  using Permutation = WideRowPermutation<SHAPE>;
  const bool is_dependent = p.is_dependent != 0;
  if (p.num_experts < 1 || p.max_token_tiles > 65535) return cudaErrorInvalidValue;
  cudaError_t error = allow_shared_memory_of_all_ctas<grouped_wide_kernel<SHAPE>, SHAPE::kTotalBytes>();
  if (error != cudaSuccess) return error;
  const int pieces = (Permutation::count_units(p.in_features) + Permutation::kWarpUnits - 1) / Permutation::kWarpUnits;
  const dim3 permuting(pieces, (p.max_token_tiles * Permutation::kGroups + kPermutingWarps - 1) / kPermutingWarps);
  error = launch_kernel(is_dependent, permuting, 32 * kPermutingWarps, 0, stream, grouped_wide_permute_kernel<SHAPE>, p);
  if (error != cudaSuccess) return error;
  const dim3 grid((p.out_features + SHAPE::kFeatures - 1) / SHAPE::kFeatures, p.max_token_tiles);
  return launch_kernel(is_dependent, grid, SHAPE::kThreads, SHAPE::kTotalBytes, stream, grouped_wide_kernel<SHAPE>, p);
}

}  // namespace slipstream
