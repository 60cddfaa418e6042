// Products of up to 128 FP8 rows with 4-bit weights in the order of the tensor cores' registers, for Hopper (sm_90a).
// Contract: gemm/int4_mm.py.
//
// One persistent CTA an SM, or a cluster of them, owns strips of output features (mixed_gemm_w4a8_shape.cuh). A warp fills a ring
// with weights and tokens (mixed_gemm_w4a8_load.cuh), four warpgroups expand and multiply in registers (mixed_gemm_w4a8_multiply.cuh),
// and sums meet in shared memory (mixed_gemm_w4a8_epilogue.cuh). The kernel starts while the one before it still runs, and fills
// its ring with weights meanwhile. Built once per SLIPSTREAM_COLUMNS (tokens: 8, 16, 32, 48, 64, 96, 128) and SLIPSTREAM_GROUPS
// (groups of 128 input features: 1, 2).

#include "ptx/dependent_launch.cuh"
#include "epilogue/mixed_gemm_w4a8_epilogue.cuh"
#include "pipeline/mixed_gemm_w4a8_load.cuh"
#include "mma/mixed_gemm_w4a8_multiply.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"
#include "host/tensor_map.h"

namespace slipstream {

template <typename SHAPE>
__device__ __forceinline__ void init_memory(const W4a8Memory<SHAPE>& memory) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < SHAPE::kStages; ++stage) {
      init_barrier(memory.full(stage), 1);
      init_barrier(memory.empty(stage), SHAPE::kConsumers / 32);
    }
    publish_barriers();
  }
  __syncthreads();
}

template <typename SHAPE, typename OUT>
__device__ __forceinline__ void multiply_passes(const MixedGemmW4a8Params& p, const W4a8Memory<SHAPE>& memory,
                                                const W4a8Share<SHAPE>& share, int warpgroup) {
  W4a8Consumer<SHAPE> multiplier{memory, share, warpgroup % SHAPE::kWarpgroupsM, warpgroup / SHAPE::kWarpgroupsM};
  const W4a8Epilogue<SHAPE, OUT> epilogue{p, memory, share};
  epilogue.load_rows(0);
  await_previous();
#pragma unroll 1
  for (int pass = 0; pass < share.num_passes; ++pass) {
    if (pass > 0) epilogue.load_rows(pass);
    epilogue.load_tokens(pass);
    float sums[SHAPE::kSums] = {};
    multiplier.multiply_pass(share.pass_begin(pass + 1) - share.pass_begin(pass), sums);
    epilogue.write(pass, sums);
  }
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kBoundThreads, 1)
    mixed_gemm_w4a8_kernel(const __grid_constant__ MixedGemmW4a8Params p, const __grid_constant__ CUtensorMap tokens) {
  extern __shared__ char shared[];
  start_dependents();
  if (threadIdx.x == SHAPE::kConsumers) prefetch_map(&tokens);
  const W4a8Memory<SHAPE> memory(shared_address(shared));
  const W4a8Share<SHAPE> share(p);
  init_memory(memory);
  // One value for the whole warp, so that the branch below is seen to be uniform.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == SHAPE::kWarpgroups) {
    lower_registers<SHAPE::kLoaderRegisters>();
    if (threadIdx.x / 32 == SHAPE::kConsumers / 32) W4a8Producer<SHAPE>{p, tokens, memory, share}.run();
    return;
  }
  raise_registers<SHAPE::kMultiplierRegisters>();
  if (p.out_is_half != 0) {
    multiply_passes<SHAPE, __half>(p, memory, share, warpgroup);
  } else {
    multiply_passes<SHAPE, __nv_bfloat16>(p, memory, share, warpgroup);
  }
}

template <typename SHAPE>
cudaError_t launch(const MixedGemmW4a8Params& p, cudaStream_t stream) {
  const cudaError_t allowed = allow_shared_memory<mixed_gemm_w4a8_kernel<SHAPE>, SHAPE::kTotalBytes>();
  if (allowed != cudaSuccess) return allowed;
  const uint64_t blocks = p.in_features / 128, tokens = p.num_tokens;
  const Extent<3> extent{{128, tokens, blocks},
                         {static_cast<uint64_t>(p.x_row_stride), 128},
                         {128, SHAPE::kColumns, SHAPE::kBlocks}};
  CUtensorMap map;
  if (!encode_tensor_map(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, p.x, extent)) {
    return cudaErrorInvalidValue;
  }
  const ClusterLaunch<SHAPE> launch(p.num_clusters, p.splits, p.is_dependent != 0, stream);
  return cudaLaunchKernelEx(&launch.config, mixed_gemm_w4a8_kernel<SHAPE>, p, map);
}

// Sums are exchanged where the ring was, so then there is one pass.
template <typename SHAPE>
bool can_run(const MixedGemmW4a8Params& p) {
  const int strips = p.out_features / 16, most = (strips + p.num_clusters - 1) / p.num_clusters;
  if (p.splits > p.in_features / 128 || p.num_tokens > SHAPE::kColumns || p.num_clusters > strips) return false;
  return (SHAPE::kWarpgroupsK == 1 && p.splits == 1) || most <= SHAPE::kStrips;
}

// count: of clusters of p.splits CTAs that run at once; null to launch.
template <int WARPGROUPS_M>
cudaError_t run_variant(const MixedGemmW4a8Params& p, cudaStream_t stream, int* count) {
  if constexpr (WARPGROUPS_M > (SLIPSTREAM_COLUMNS > 64 ? 2 : 4)) {
    return cudaErrorInvalidConfiguration;
  } else {
    using Shape = W4a8Shape<SLIPSTREAM_COLUMNS, SLIPSTREAM_GROUPS, WARPGROUPS_M>;
    if (count != nullptr) return count_clusters<Shape, mixed_gemm_w4a8_kernel<Shape>>(p.splits, count);
    return can_run<Shape>(p) ? launch<Shape>(p, stream) : cudaErrorInvalidConfiguration;
  }
}

cudaError_t run(const MixedGemmW4a8Params& p, cudaStream_t stream, int* count) {
  switch (p.warpgroups_m) {
    case 1: return run_variant<1>(p, stream, count);
    case 2: return run_variant<2>(p, stream, count);
    case 4: return run_variant<4>(p, stream, count);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace slipstream

// Both return a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_mixed_gemm_w4a8(const slipstream::MixedGemmW4a8Params* params, void* stream) {
  return slipstream::run(*params, static_cast<cudaStream_t>(stream), nullptr);
}

SLIPSTREAM_API int slipstream_mixed_gemm_w4a8_clusters(const slipstream::MixedGemmW4a8Params* params, int* count) {
  return slipstream::run(*params, nullptr, count);
}
