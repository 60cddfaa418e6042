// Products of rows sorted by expert with their experts' 4-bit weights stored as records, for Hopper (sm_90a). Contract:
// moe/grouped_int4_mm.py.
//
// Up to 64 rows an expert the bytes of the weights are the bound. One persistent CTA an SM streams an equal share of the
// strips of the experts that have rows (expert_walk.cuh) through a ring in shared memory, which one warp fills by bulk
// copies (record_load.cuh); four warpgroups expand codes and multiply in registers (record_multiply.cuh) and write
// (record_epilogue.cuh). Which experts have rows is known on the device alone. A small kernel before quantises and
// gathers the rows (record_gather.cuh). Built once per SLIPSTREAM_COLUMNS (rows of a tile) and SLIPSTREAM_GATED.

#include "host/kernel_launch.h"
#include "host/library.h"
#include "epilogue/record_epilogue.cuh"
#include "pipeline/record_gather.cuh"
#include "pipeline/record_load.cuh"
#include "mma/record_multiply.cuh"

namespace slipstream {

constexpr int kGatherThreads = 512;

template <typename IN>
__global__ void __launch_bounds__(kGatherThreads) gather_records_kernel(const __grid_constant__ ExpertParams p) {
  __shared__ RowPlace place;
  __shared__ float of_warps[kGatherThreads / 32];
  await_previous();
  start_dependents();   // not at once: the next kernel reads the offsets, which are there from here on
  if (threadIdx.x < 32) find_row(p, SLIPSTREAM_COLUMNS, blockIdx.x, &place);
  __syncthreads();
  gather_row<RecordShape<SLIPSTREAM_COLUMNS, 4>, IN, kGatherThreads>(p, place, of_warps);
}

template <typename SHAPE, typename OUT>
__device__ __forceinline__ void multiply_passes(const ExpertParams& p, const RecordMemory<SHAPE>& memory,
                                                const int* plan) {
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  RecordMultiplier<SHAPE> multiplier{memory, p.in_features / 128, warpgroup % SHAPE::kWarpgroupsM, warpgroup / SHAPE::kWarpgroupsM};
  int index = 0;
#pragma unroll 1
  for (PassWalk<SHAPE> walk(p, plan); !walk.is_done(); ++index) {
    const Pass pass = walk.take();
    const RecordEpilogue<SHAPE, OUT, SLIPSTREAM_GATED != 0> epilogue{p, memory, pass, index};
    epilogue.load_scales();
    float sums[SHAPE::kSums] = {};
    multiplier.multiply_pass(pass.num_units, sums);
    epilogue.write(sums);
  }
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 1) record_experts_kernel(const __grid_constant__ ExpertParams p) {
  extern __shared__ char shared[];
  start_dependents();
  const RecordMemory<SHAPE> memory(shared_address(shared));
  int* plan = reinterpret_cast<int*>(shared + (memory.base - shared_address(shared)) + SHAPE::kPlanOffset);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < SHAPE::kStages; ++stage) {
      init_barrier(memory.full(stage), 1);
      init_barrier(memory.empty(stage), SHAPE::kConsumers / 32);
    }
    publish_barriers();
  }
  if (threadIdx.x < 32) plan_passes<SHAPE>(p, plan);
  __syncthreads();
  // One value for the whole warp, so that the branch below is seen to be uniform.
  if (__shfl_sync(~0u, threadIdx.x / 128, 0) == SHAPE::kWarpgroups) {
    lower_registers<SHAPE::kLoaderRegisters>();
    if (threadIdx.x / 32 == SHAPE::kConsumers / 32) RecordLoader<SHAPE>{p, memory, plan}.run();
    return;
  }
  raise_registers<SHAPE::kMultiplierRegisters>();
  await_previous();
  if (p.out_is_half != 0) {
    multiply_passes<SHAPE, __half>(p, memory, plan);
  } else {
    multiply_passes<SHAPE, __nv_bfloat16>(p, memory, plan);
  }
}

cudaError_t gather(const ExpertParams& p, cudaStream_t stream) {
  const auto kernel = p.x_bytes == 1       ? gather_records_kernel<__nv_fp8_e4m3>
                      : p.out_is_half != 0 ? gather_records_kernel<__half>
                                           : gather_records_kernel<__nv_bfloat16>;
  return launch_kernel(p.is_dependent != 0, dim3(p.num_rows), kGatherThreads, 0, stream, kernel, p);
}

template <int WARPGROUPS_M>
cudaError_t launch(const ExpertParams& p, cudaStream_t stream) {
  using Shape = RecordShape<SLIPSTREAM_COLUMNS, WARPGROUPS_M>;
  const cudaError_t gathered = gather(p, stream);
  return gathered != cudaSuccess ? gathered : launch_shape<Shape, record_experts_kernel<Shape>>(p, p.num_ctas, stream);
}

// Few strips a CTA: four or eight at once, whose input features the warpgroups share out.
cudaError_t run(const ExpertParams& p, cudaStream_t stream) {
  if (p.warpgroups_m == 4) return launch<4>(p, stream);
#if SLIPSTREAM_COLUMNS == 16
  if (p.warpgroups_m == 2) return launch<2>(p, stream);
  if (p.warpgroups_m == 1) return launch<1>(p, stream);
#endif
  return cudaErrorInvalidValue;
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_record_experts(const slipstream::ExpertParams* params, void* stream) {
  const slipstream::ExpertParams& p = *params;
  const bool is_served = p.num_experts >= 1 && p.num_experts <= slipstream::RecordShape<16, 4>::kMostExperts &&
                         p.num_rows >= 1 && p.out_features % 32 == 0 && p.in_features % 128 == 0;
  return is_served ? slipstream::run(p, static_cast<cudaStream_t>(stream)) : cudaErrorInvalidValue;
}
