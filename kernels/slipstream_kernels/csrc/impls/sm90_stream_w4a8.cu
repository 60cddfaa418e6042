// Products of 65 to 512 e4m3 tokens with 4-bit weights, for Hopper (sm_90a): y = x W^T. Contract: gemm/int4_mm.py.
//
// Weights become operands in the registers of the warps that multiply (stream_w4a8_multiply.cuh): no expanded weight goes
// through shared memory. The chunks of all tiles are shared out evenly over the CTAs, which add the sums of tiles that they
// share through global memory (stream_epilogue.cuh). The kernel starts while the one before it still runs, and fills its ring
// with weights before it waits for that kernel's results. Built once per SLIPSTREAM_OUT, SLIPSTREAM_GROUPS (of 128 features,
// with scales of their own: 1, 2), SLIPSTREAM_WARPGROUPS (of consumers: 2, 3), SLIPSTREAM_COLUMNS (tokens of a tile) and
// SLIPSTREAM_IS_EXACT.

#include <cuda.h>
#include <cuda_runtime.h>

#include "host/kernel_launch.h"
#include "host/library.h"
#include "host/tensor_map.h"
#include "mma/stream_w4a8_product.cuh"

namespace slipstream {

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 1)
    stream_w4a8_kernel(const __grid_constant__ StreamW4A8Params p, const __grid_constant__ StreamW4A8Maps maps) {
  extern __shared__ char shared[];
  multiply_stream_w4a8<SHAPE>(p, maps, shared);
}

template <typename SHAPE>
bool fits(const StreamW4A8Params& p) {
  const bool has_whole_sums = p.token_tiles == 1 || SHAPE::kColumns == 128;   // of the activations of a tile
  return runs_fit<SHAPE>(p) && p.token_tiles * int64_t{SHAPE::kColumns} <= SHAPE::kMostTokens &&
         (!SHAPE::kIsExact || has_whole_sums);
}

template <typename SHAPE>
cudaError_t launch(const StreamW4A8Params& p, cudaStream_t stream) {
  const cudaError_t allowed = allow_shared_memory<stream_w4a8_kernel<SHAPE>, SHAPE::kTotalBytes>();
  if (allowed != cudaSuccess) return allowed;
  if (!fits<SHAPE>(p)) return cudaErrorInvalidConfiguration;
  StreamW4A8Maps maps;
  const Extent<2> tokens{{static_cast<uint64_t>(p.in_features), static_cast<uint64_t>(p.num_tokens)},
                         {static_cast<uint64_t>(p.x_row_stride)},
                         {128, SHAPE::kColumns}};
  if (!encode_tensor_map(&maps.tokens, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, p.x, tokens)) {
    return cudaErrorInvalidValue;
  }
  return launch_kernel(p.is_dependent != 0, dim3(p.num_ctas), SHAPE::kThreads, SHAPE::kTotalBytes, stream,
                       stream_w4a8_kernel<SHAPE>, p, maps);
}

using Compiled = StreamW4A8Shape<SLIPSTREAM_OUT, SLIPSTREAM_GROUPS, SLIPSTREAM_WARPGROUPS, SLIPSTREAM_COLUMNS,
                                 SLIPSTREAM_IS_EXACT != 0>;

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_stream_w4a8(const StreamW4A8Params* params, void* stream) {
  return slipstream::launch<slipstream::Compiled>(*params, static_cast<cudaStream_t>(stream));
}

// How many CTAs run at once on this device; 0: none.
SLIPSTREAM_API int slipstream_count_ctas() {
  int count = 0;
  const cudaError_t error =
      slipstream::count_clusters<slipstream::Compiled, slipstream::stream_w4a8_kernel<slipstream::Compiled>>(1, &count);
  return error == cudaSuccess ? count : 0;
}
