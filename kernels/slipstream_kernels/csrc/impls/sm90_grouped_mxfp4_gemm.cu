// Grouped GEMM with the experts' MXFP4 weights and bf16 rows, for Hopper (sm_90a). Contract: moe/grouped_int4_mm.py.
//
// Small CTAs of which an SM runs several: while one begins or ends, others stream (mma/grouped_mxfp4_multiply.cuh). Built
// once per SLIPSTREAM_COLUMNS (8 rows each, of a tile of tokens), SLIPSTREAM_TEAM_WARPS (32 output features each) and
// SLIPSTREAM_TEAMS (which divide the input features).
#include "host/kernel_launch.h"
#include "host/library.h"
#include "mma/grouped_mxfp4_multiply.cuh"
#include "ptx/dependent_launch.cuh"

namespace slipstream {

using Shape = GroupedMxfp4Shape<SLIPSTREAM_COLUMNS, SLIPSTREAM_TEAM_WARPS, SLIPSTREAM_TEAMS>;

__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtas)
    grouped_mxfp4_gemm_kernel(const __grid_constant__ GroupedGemmParams p) {
  extern __shared__ __align__(16) char memory[];
  start_dependents();
  await_previous();
  multiply_grouped_mxfp4<Shape>(p, blockIdx.x, blockIdx.y, memory);
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_grouped_mxfp4_gemm(const slipstream::GroupedGemmParams* params, void* stream) {
  using slipstream::Shape;
  const slipstream::GroupedGemmParams& p = *params;
  const bool is_served = p.num_experts >= 1 && p.max_token_tiles <= 65535 &&
                         p.out_features % 32 == 0 && p.in_features % 32 == 0;
  if (!is_served) return cudaErrorInvalidValue;
  const cudaError_t allowed =
      slipstream::allow_shared_memory_of_all_ctas<slipstream::grouped_mxfp4_gemm_kernel, Shape::kTotalBytes>();
  if (allowed != cudaSuccess) return allowed;
  const dim3 grid((p.out_features + Shape::kFeatures - 1) / Shape::kFeatures, p.max_token_tiles);
  return slipstream::launch_kernel(p.is_dependent != 0, grid, Shape::kThreads, Shape::kTotalBytes,
                                   static_cast<cudaStream_t>(stream), slipstream::grouped_mxfp4_gemm_kernel, p);
}
