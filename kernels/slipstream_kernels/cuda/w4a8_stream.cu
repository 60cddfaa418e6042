// Products of some tens of FP8 rows with 4-bit weights, for Hopper (sm_90a). Contract: ops/int4_mm.py.
//
// One persistent CTA per SM, or a cluster of them for narrow outputs, owns strips of output features
// (w4a8_stream_shape.cuh). Two warps fill a ring with codes and activations (w4a8_stream_load.cuh), two add activations
// up, four warpgroups multiply (w4a8_stream_multiply.cuh), and the sums of a cluster meet in its shared memory
// (w4a8_stream_epilogue.cuh). The kernel starts while the one before it still runs, and fills its ring with weights
// meanwhile.

#include <cuda_fp8.h>

#include "dependent_launch.cuh"
#include "kernel_launch.h"
#include "library.h"
#include "tensor_map.h"
#include "w4a8_stream_epilogue.cuh"
#include "w4a8_stream_load.cuh"
#include "w4a8_stream_multiply.cuh"
#include "w4a8_stream_totals.cuh"

namespace slipstream {

template <typename SHAPE>
__device__ __forceinline__ void init_memory(const W4a8Memory<SHAPE>& memory) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < SHAPE::kStages; ++stage) {
      init_barrier(memory.filled(stage), 1);
      init_barrier(memory.emptied(stage), SHAPE::kStrips);
      init_barrier(memory.summed(stage), SHAPE::kAdders);
    }
    publish_barriers();
  }
  __syncthreads();
}

template <typename SHAPE, typename OUT>
__device__ __forceinline__ void multiply_passes(const W4a8StreamParams& p, const W4a8Memory<SHAPE>& memory,
                                                const W4a8Share& share) {
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  W4a8Multiplier<SHAPE> multiplier{memory, share, warpgroup};
  const W4a8Epilogue<SHAPE, OUT> epilogue{p, memory, share};
#pragma unroll 1
  for (int pass = 0; pass < share.num_passes; ++pass) {
    float sums[SHAPE::kSums] = {};
    multiplier.multiply_pass(4 * warpgroup >= share.pass_begin(pass + 1) - share.pass_begin(pass), sums);
    epilogue.write(pass, sums);
  }
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 1)
    w4a8_stream_kernel(const __grid_constant__ W4a8StreamParams p, const __grid_constant__ CUtensorMap tokens) {
  extern __shared__ char shared[];
  start_dependents();
  const W4a8Memory<SHAPE> memory(shared_address(shared));
  const W4a8Share share(p);
  init_memory(memory);
  if (__shfl_sync(~0u, threadIdx.x / 128, 0) == SHAPE::kConsumers / 128) {
    lower_registers<32>();
    const int helper = threadIdx.x / 32 - SHAPE::kStrips;
    if (helper < SHAPE::kLoaders) {
      W4a8Loader<SHAPE>{p, tokens, memory, share, helper}.run();
    } else {
      W4a8Adder<SHAPE>{memory, share, helper - SHAPE::kLoaders}.run();
    }
    return;
  }
  raise_registers<112>();
  await_previous();
  if (p.out_is_half != 0) {
    multiply_passes<SHAPE, __half>(p, memory, share);
  } else {
    multiply_passes<SHAPE, __nv_bfloat16>(p, memory, share);
  }
}

template <typename SHAPE>
cudaError_t launch(const W4a8StreamParams& p, cudaStream_t stream) {
  const cudaError_t allowed = allow_shared_memory<w4a8_stream_kernel<SHAPE>, SHAPE::kTotalBytes>();
  if (allowed != cudaSuccess) return allowed;
  const uint64_t row = p.in_features, tokens = p.num_tokens;
  const Extent<2> extent{{row, tokens}, {static_cast<uint64_t>(p.x_row_stride)}, {128, SHAPE::kColumns}};
  CUtensorMap map;
  if (!encode_tensor_map(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, p.x, extent)) {
    return cudaErrorInvalidValue;
  }
  const ClusterLaunch<SHAPE> launch(p.num_clusters, p.splits, p.is_dependent != 0, stream);
  return cudaLaunchKernelEx(&launch.config, w4a8_stream_kernel<SHAPE>, p, map);
}

// count: of clusters of p.splits CTAs that run at once; null to launch.
template <typename SHAPE>
cudaError_t run_shape(const W4a8StreamParams& p, cudaStream_t stream, int* count) {
  if (count == nullptr) return launch<SHAPE>(p, stream);
  return count_clusters<SHAPE, w4a8_stream_kernel<SHAPE>>(p.splits, count);
}

template <int COLUMNS>
cudaError_t run_columns(const W4a8StreamParams& p, cudaStream_t stream, int* count) {
  if (p.groups_per_block == 1) return run_shape<W4a8Shape<COLUMNS, 1>>(p, stream, count);
  return run_shape<W4a8Shape<COLUMNS, 2>>(p, stream, count);
}

cudaError_t run(const W4a8StreamParams& p, cudaStream_t stream, int* count) {
  if (p.groups_per_block != 1 && p.groups_per_block != 2) return cudaErrorInvalidValue;
  switch (p.columns) {
    case 16: return run_columns<16>(p, stream, count);
    case 32: return run_columns<32>(p, stream, count);
    case 64: return run_columns<64>(p, stream, count);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace slipstream

// Both return a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_w4a8_stream(const slipstream::W4a8StreamParams* params, void* stream) {
  return slipstream::run(*params, static_cast<cudaStream_t>(stream), nullptr);
}

SLIPSTREAM_API int slipstream_w4a8_stream_clusters(const slipstream::W4a8StreamParams* params, int* count) {
  return slipstream::run(*params, nullptr, count);
}
