// Grouped GEMM with the experts' 4-bit weights and 16-bit operands, for Hopper (sm_90a). Contract:
// moe/grouped_int4_mm.py.
//
// Up to 48 rows an expert the time is that of reading the weights. A small kernel first permutes the rows into tiles of
// tokens, each of one expert. Then one persistent CTA an SM streams an equal number of passes
// (grouped_gemm_schedule.cuh): one warp fills a ring in shared memory by bulk copies (grouped_w4a16_load.cuh), eight
// warps multiply (grouped_w4a16_multiply.cuh) and write (grouped_w4a16_epilogue.cuh). Only the device knows which experts
// have rows. Built once per SLIPSTREAM_INPUT (__nv_bfloat16, __half, or __nv_fp8_e4m3, multiplied as fp16, exactly),
// SLIPSTREAM_COLUMNS (8 rows each, of a tile of tokens), SLIPSTREAM_GROUPS (of a block) and SLIPSTREAM_GATED.
#include "epilogue/grouped_w4a16_epilogue.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"

namespace slipstream {

template <typename SHAPE>
__global__ void __launch_bounds__(192) permute_rows_kernel(const __grid_constant__ GroupedGemmParams p) {
  __shared__ int token_tile_ends[SHAPE::kMaxExperts];
  await_previous();
  start_dependents();   // after the wait: the next kernel reads the offsets at its start
  if (threadIdx.x < 32) count_token_tiles(p, SHAPE::kTileRows, token_tile_ends);
  __syncthreads();
  if (static_cast<int>(blockIdx.y) < token_tile_ends[p.num_experts - 1]) permute_token_tile<SHAPE>(p, token_tile_ends);
}

template <typename SHAPE, typename OUT>
__device__ __forceinline__ void multiply_passes(const GroupedGemmParams& p, const GroupedW4A16Memory<SHAPE>& ring,
                                                char* memory) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp / SHAPE::kRowWarps;
  GroupedW4A16Consumer<SHAPE> consumer{ring, warp % SHAPE::kRowWarps, half, lane, p.is_channelwise != 0, {}};
  const GroupedW4A16Epilogue<SHAPE, OUT> epilogue{p, reinterpret_cast<float4*>(memory + SHAPE::kExchangeOffset),
                                                  warp % SHAPE::kRowWarps, half, lane};
#pragma unroll 1
  for (PassWalk<SHAPE> walk(p, reinterpret_cast<const int*>(memory + SHAPE::kScheduleOffset)); !walk.is_done();) {
    const Pass pass = walk.take();
    GroupedW4A16Sums<SHAPE> sums;
    consumer.consume(pass, p.in_features / 128, sums);
    epilogue.finish(pass, sums);
  }
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 1)
    grouped_w4a16_gemm_kernel(const __grid_constant__ GroupedGemmParams p) {
  extern __shared__ __align__(128) char memory[];
  const GroupedW4A16Memory<SHAPE> ring{shared_address(memory)};
  int* token_tile_ends = reinterpret_cast<int*>(memory + SHAPE::kScheduleOffset);
  start_dependents();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < SHAPE::kStages; ++stage) {
      init_barrier(ring.full(stage), 1);
      init_barrier(ring.empty(stage), SHAPE::kWarps);
    }
    publish_barriers();
  }
  if (threadIdx.x < 32) plan_passes<SHAPE>(p, token_tile_ends);
  __syncthreads();
  if (threadIdx.x >= 32 * SHAPE::kWarps) {
    lower_registers<SHAPE::kProducerRegisters>();
    if (threadIdx.x < 32 * (SHAPE::kWarps + 1)) produce_stages<SHAPE>(p, ring, token_tile_ends);
    return;
  }
  raise_registers<SHAPE::kConsumerRegisters>();
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
    GroupedW4A16Shape<Input, OperandOf<Input>::Type, SLIPSTREAM_COLUMNS, SLIPSTREAM_GROUPS, SLIPSTREAM_GATED != 0>;

cudaError_t launch(const GroupedGemmParams& params, cudaStream_t stream) {
  const dim3 token_tiles(params.in_features / 128, params.max_token_tiles);
  const cudaError_t permuted =
      launch_kernel(params.is_dependent != 0, token_tiles, 192, 0, stream, permute_rows_kernel<Shape>, params);
  if (permuted != cudaSuccess) return permuted;
  return launch_shape<Shape, grouped_w4a16_gemm_kernel<Shape>>(params, params.num_ctas, stream);
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_grouped_w4a16_gemm(const slipstream::GroupedGemmParams* params, void* stream) {
  const bool is_served = params->num_experts >= 1 && params->num_experts <= slipstream::Shape::kMaxExperts &&
                         params->max_token_tiles <= 65535 && params->out_features % (16 * slipstream::Shape::kItemTiles) == 0;
  return is_served ? slipstream::launch(*params, static_cast<cudaStream_t>(stream)) : cudaErrorInvalidValue;
}
