// Grouped GEMM with the experts' 4-bit weights and e4m3 operands, for Hopper (sm_90a). Contract: moe/grouped_int4_mm.py.
//
// Up to 64 rows an expert the time is that of reading the weights. A small kernel first quantises the rows and permutes
// them into tiles of tokens, each of one expert (grouped_w4a8_permute.cuh). Then one persistent CTA an SM streams an equal
// number of passes (grouped_gemm_schedule.cuh): one warp fills a ring in shared memory by bulk copies
// (grouped_w4a8_load.cuh), four warpgroups expand the weights in registers, multiply (grouped_w4a8_multiply.cuh) and write
// (grouped_w4a8_epilogue.cuh). Only the device knows which experts have rows. Built once per SLIPSTREAM_COLUMNS (rows of
// a tile of tokens) and SLIPSTREAM_GATED.
#include "host/kernel_launch.h"
#include "host/library.h"
#include "epilogue/grouped_w4a8_epilogue.cuh"
#include "pipeline/grouped_w4a8_permute.cuh"
#include "pipeline/grouped_w4a8_load.cuh"
#include "mma/grouped_w4a8_multiply.cuh"

namespace slipstream {

constexpr int kPermuteThreads = 512;

template <typename IN>
__global__ void __launch_bounds__(kPermuteThreads) permute_rows_kernel(const __grid_constant__ GroupedGemmParams p) {
  __shared__ PermutedRow row;
  __shared__ float of_warps[kPermuteThreads / 32];
  await_previous();
  start_dependents();   // after the wait: the next kernel reads the offsets at its start
  if (threadIdx.x < 32) find_permuted_row(p, SLIPSTREAM_COLUMNS, blockIdx.x, &row);
  __syncthreads();
  permute_row<GroupedW4A8Shape<SLIPSTREAM_COLUMNS, 4>, IN, kPermuteThreads>(p, row, of_warps);
}

template <typename SHAPE, typename OUT>
__device__ __forceinline__ void multiply_passes(const GroupedGemmParams& p, const GroupedW4A8Memory<SHAPE>& memory,
                                                const int* token_tile_ends) {
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  GroupedW4A8Consumer<SHAPE> consumer{memory, p.in_features / 128, warpgroup % SHAPE::kWarpgroupsM,
                                      warpgroup / SHAPE::kWarpgroupsM};
  int index = 0;
#pragma unroll 1
  for (PassWalk<SHAPE> walk(p, token_tile_ends); !walk.is_done(); ++index) {
    const Pass pass = walk.take();
    const GroupedW4A8Epilogue<SHAPE, OUT, SLIPSTREAM_GATED != 0> epilogue{p, memory, pass, index};
    epilogue.load_scales();
    float sums[SHAPE::kSums] = {};
    consumer.multiply_pass(pass.num_items, sums);
    epilogue.write(sums);
  }
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 1)
    grouped_w4a8_gemm_kernel(const __grid_constant__ GroupedGemmParams p) {
  extern __shared__ char shared[];
  start_dependents();
  const GroupedW4A8Memory<SHAPE> memory(shared_address(shared));
  int* token_tile_ends = reinterpret_cast<int*>(shared + (memory.base - shared_address(shared)) + SHAPE::kScheduleOffset);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < SHAPE::kStages; ++stage) {
      init_barrier(memory.full(stage), 1);
      init_barrier(memory.empty(stage), SHAPE::kConsumers / 32);
    }
    publish_barriers();
  }
  if (threadIdx.x < 32) plan_passes<SHAPE>(p, token_tile_ends);
  __syncthreads();
  // One value for the whole warp, so that the branch below is seen to be uniform.
  if (__shfl_sync(~0u, threadIdx.x / 128, 0) == SHAPE::kWarpgroups) {
    lower_registers<SHAPE::kProducerRegisters>();
    if (threadIdx.x / 32 == SHAPE::kConsumers / 32) GroupedW4A8Producer<SHAPE>{p, memory, token_tile_ends}.run();
    return;
  }
  raise_registers<SHAPE::kConsumerRegisters>();
  await_previous();
  if (p.out_is_half != 0) {
    multiply_passes<SHAPE, __half>(p, memory, token_tile_ends);
  } else {
    multiply_passes<SHAPE, __nv_bfloat16>(p, memory, token_tile_ends);
  }
}

cudaError_t permute(const GroupedGemmParams& p, cudaStream_t stream) {
  const auto kernel = p.x_bytes == 1       ? permute_rows_kernel<__nv_fp8_e4m3>
                      : p.out_is_half != 0 ? permute_rows_kernel<__half>
                                           : permute_rows_kernel<__nv_bfloat16>;
  return launch_kernel(p.is_dependent != 0, dim3(p.num_rows), kPermuteThreads, 0, stream, kernel, p);
}

template <int WARPGROUPS_M>
cudaError_t launch(const GroupedGemmParams& p, cudaStream_t stream) {
  using Shape = GroupedW4A8Shape<SLIPSTREAM_COLUMNS, WARPGROUPS_M>;
  const cudaError_t permuted = permute(p, stream);
  if (permuted != cudaSuccess) return permuted;
  return launch_shape<Shape, grouped_w4a8_gemm_kernel<Shape>>(p, p.num_ctas, stream);
}

// warpgroups_m 1, 2: CTAs with few tiles have 4 or 8 at once, and the warpgroups divide the input features.
cudaError_t run(const GroupedGemmParams& p, cudaStream_t stream) {
  if (p.warpgroups_m == 4) return launch<4>(p, stream);
#if SLIPSTREAM_COLUMNS == 16
  if (p.warpgroups_m == 2) return launch<2>(p, stream);
  if (p.warpgroups_m == 1) return launch<1>(p, stream);
#endif
  return cudaErrorInvalidValue;
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_grouped_w4a8_gemm(const slipstream::GroupedGemmParams* params, void* stream) {
  const slipstream::GroupedGemmParams& p = *params;
  const bool is_served = p.num_experts >= 1 && p.num_experts <= slipstream::GroupedW4A8Shape<16, 4>::kMaxExperts &&
                         p.num_rows >= 1 && p.out_features % 32 == 0 && p.in_features % 128 == 0;
  return is_served ? slipstream::run(p, static_cast<cudaStream_t>(stream)) : cudaErrorInvalidValue;
}
