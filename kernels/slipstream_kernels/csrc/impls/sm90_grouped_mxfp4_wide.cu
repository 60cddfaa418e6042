// Grouped GEMM with the experts' MXFP4 weights and bf16 rows, for Hopper (sm_90a), from some ten rows an expert on. Contract:
// moe/grouped_int4_mm.py. Built once per variant of schedule/grouped_mxfp4_wide_shape.cuh.
#include "host/kernel_launch.h"
#include "host/library.h"
#include "mma/grouped_mxfp4_wide_multiply.cuh"
#include "ptx/dependent_launch.cuh"

namespace slipstream {

using Shape = GroupedMxfp4WideShape<SLIPSTREAM_TILE_ROWS, SLIPSTREAM_STAGE_UNITS, SLIPSTREAM_STAGES, SLIPSTREAM_CTAS>;
constexpr int kPermutingWarps = 4, kGroups = Shape::kTileRows / 8;   // warps of a CTA; groups of rows of a tile

__global__ void __launch_bounds__(32 * kPermutingWarps) grouped_mxfp4_permute_kernel(const __grid_constant__ GroupedGemmParams p) {
  start_dependents();
  await_previous();
  const int group = blockIdx.y * kPermutingWarps + threadIdx.x / 32;
  if (group >= p.max_token_tiles * kGroups) return;
  const Mxfp4RowPermutation permutation{p, Shape::kTileRows};
  permutation.run(group / kGroups, group % kGroups, blockIdx.x * Mxfp4RowPermutation::kWarpUnits);
}

__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtas)
    grouped_mxfp4_wide_kernel(const __grid_constant__ GroupedGemmParams p) {
  extern __shared__ __align__(1024) char memory[];
  start_dependents();
  await_previous();
  multiply_grouped_mxfp4_wide<Shape>(p, blockIdx.x, blockIdx.y, memory);
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success. permuted_x: max_token_tiles * kTileRows rows of whole units.
SLIPSTREAM_API int slipstream_grouped_mxfp4_wide(const slipstream::GroupedGemmParams* params, void* stream) {
  using namespace slipstream;
  const GroupedGemmParams& p = *params;
  const auto on_stream = static_cast<cudaStream_t>(stream);
  const bool is_dependent = p.is_dependent != 0;
  const bool is_served = p.num_experts >= 1 && p.max_token_tiles <= 65535 && p.out_features % 32 == 0 && p.in_features % 32 == 0;
  if (!is_served) return cudaErrorInvalidValue;
  cudaError_t error = allow_shared_memory_of_all_ctas<grouped_mxfp4_wide_kernel, Shape::kTotalBytes>();
  if (error != cudaSuccess) return error;
  constexpr int kUnits = Mxfp4RowPermutation::kWarpUnits;
  const dim3 permuting((Shape::Unit::count(p.in_features) + kUnits - 1) / kUnits,
                       (p.max_token_tiles * kGroups + kPermutingWarps - 1) / kPermutingWarps);
  error = launch_kernel(is_dependent, permuting, 32 * kPermutingWarps, 0, on_stream, grouped_mxfp4_permute_kernel, p);
  if (error != cudaSuccess) return error;
  const dim3 grid((p.out_features + Shape::kFeatures - 1) / Shape::kFeatures, p.max_token_tiles);
  return launch_kernel(is_dependent, grid, Shape::kThreads, Shape::kTotalBytes, on_stream, grouped_mxfp4_wide_kernel, p);
}
