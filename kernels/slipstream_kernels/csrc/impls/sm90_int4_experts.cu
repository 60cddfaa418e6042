// Products of rows sorted by expert with their experts' 4-bit weights, for Hopper (sm_90a). Contract:
// moe/grouped_int4_mm.py.
//
// Up to 48 rows an expert the bytes of the weights are the bound. One persistent CTA per SM streams an equal share of
// the strips of the experts that have rows (expert_walk.cuh) through a ring in shared memory, which one warp fills by
// bulk copies (expert_load.cuh); eight warps multiply (expert_multiply.cuh) and write (expert_epilogue.cuh). Which
// experts have rows is known on the device alone. A small kernel before gathers the rows. Built once per
// SLIPSTREAM_INPUT (__nv_bfloat16, __half, or __nv_fp8_e4m3, multiplied as fp16, exactly), SLIPSTREAM_COLUMNS of 8 rows
// in a tile, SLIPSTREAM_GROUPS of a block and SLIPSTREAM_GATED.

#include "epilogue/expert_epilogue.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"

namespace slipstream {

template <typename SHAPE>
__global__ void __launch_bounds__(192) arrange_experts_kernel(const __grid_constant__ ExpertParams p) {
  __shared__ int tiles_until[SHAPE::kMostExperts];
  await_previous();
  start_dependents();   // not at once: the next kernel reads the offsets, which are there from here on
  if (threadIdx.x < 32) count_tiles(p, SHAPE::kTileRows, tiles_until);
  __syncthreads();
  if (static_cast<int>(blockIdx.y) < tiles_until[p.num_experts - 1]) arrange_tile<SHAPE>(p, tiles_until);
}

template <typename SHAPE, typename OUT>
__device__ __forceinline__ void multiply_passes(const ExpertParams& p, const ExpertRing<SHAPE>& ring, char* memory) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp / SHAPE::kRowWarps;
  ExpertConsumer<SHAPE> consumer{ring, warp % SHAPE::kRowWarps, half, lane, p.is_channelwise != 0, {}};
  const ExpertEpilogue<SHAPE, OUT> epilogue{p, reinterpret_cast<float4*>(memory + SHAPE::kExchangeOffset),
                                            warp % SHAPE::kRowWarps, half, lane};
#pragma unroll 1
  for (PassWalk<SHAPE> walk(p, reinterpret_cast<const int*>(memory + SHAPE::kUntilOffset)); !walk.is_done();) {
    const Pass pass = walk.take();
    ExpertSums<SHAPE> sums;
    consumer.consume(pass, p.in_features / 128, sums);
    epilogue.finish(pass, sums);
  }
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 1) int4_experts_kernel(const __grid_constant__ ExpertParams p) {
  extern __shared__ __align__(128) char memory[];
  const ExpertRing<SHAPE> ring{shared_address(memory)};
  int* tiles_until = reinterpret_cast<int*>(memory + SHAPE::kUntilOffset);
  start_dependents();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < SHAPE::kStages; ++stage) {
      init_barrier(ring.full(stage), 1);
      init_barrier(ring.empty(stage), SHAPE::kWarps);
    }
    publish_barriers();
  }
  if (threadIdx.x < 32) plan_passes<SHAPE>(p, tiles_until);
  __syncthreads();
  if (threadIdx.x >= 32 * SHAPE::kWarps) {
    lower_registers<SHAPE::kFillerRegisters>();
    if (threadIdx.x < 32 * (SHAPE::kWarps + 1)) fill_stages<SHAPE>(p, ring, tiles_until);
    return;
  }
  raise_registers<SHAPE::kMultiplierRegisters>();
  await_previous();
  using Input = typename SHAPE::Input;
  if constexpr (sizeof(Input) == 2) {
    multiply_passes<SHAPE, Input>(p, ring, memory);
  } else if (p.out_is_half != 0) {
    multiply_passes<SHAPE, __half>(p, ring, memory);
  } else {
    multiply_passes<SHAPE, __nv_bfloat16>(p, ring, memory);
  }
}

using Input = SLIPSTREAM_INPUT;
template <typename T>
struct OperandOf {
  using Type = T;
};
template <>
struct OperandOf<__nv_fp8_e4m3> {
  using Type = __half;
};

using Shape =
    ExpertShape<Input, OperandOf<Input>::Type, SLIPSTREAM_COLUMNS, SLIPSTREAM_GROUPS, SLIPSTREAM_GATED != 0>;

cudaError_t launch(const ExpertParams& params, cudaStream_t stream) {
  const dim3 tiles(params.in_features / 128, params.most_tiles);
  const cudaError_t arranged =
      launch_kernel(params.is_dependent != 0, tiles, 192, 0, stream, arrange_experts_kernel<Shape>, params);
  if (arranged != cudaSuccess) return arranged;
  return launch_shape<Shape, int4_experts_kernel<Shape>>(params, params.num_ctas, stream);
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_int4_experts(const slipstream::ExpertParams* params, void* stream) {
  const bool is_served = params->num_experts >= 1 && params->num_experts <= slipstream::Shape::kMostExperts &&
                         params->most_tiles <= 65535 && params->out_features % (16 * slipstream::Shape::kUnit) == 0;
  return is_served ? slipstream::launch(*params, static_cast<cudaStream_t>(stream)) : cudaErrorInvalidValue;
}
