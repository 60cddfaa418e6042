// Products of few tokens with large weights, for Hopper (sm_90a): y = x W^T. Contract: gemm/skinny_gemm.py.
//
// The time is that of reading W. One persistent CTA an SM streams whole weight rows, an equal part of them or passes that
// it draws from a queue (skinny_gemm_shape.cuh, skinny_gemm_passes.cuh), through a ring in shared memory. Two warps fill it
// by bulk copies (skinny_gemm_producer.cuh); 8 warps multiply 16 weight rows by 8 tokens at a time
// (skinny_gemm_consumer.cuh) and add their sums at the end (skinny_gemm_epilogue.cuh). The kernel starts while the one
// before it still runs, and fills its ring before it waits for that kernel's results: no kernel writes weights. Built once
// per SLIPSTREAM_OPERAND (__half, __nv_bfloat16) and SLIPSTREAM_WEIGHTS (a format of skinny_gemm_weights.cuh).

#include "ptx/dependent_launch.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"
#include "epilogue/skinny_gemm_epilogue.cuh"
#include "pipeline/skinny_gemm_producer.cuh"
#include "formats/skinny_gemm_weights.cuh"

namespace slipstream {

template <typename SHAPE>
__device__ __forceinline__ void init_barriers(uint32_t barriers, uint32_t mailbox) {
  for (int stage = 0; stage < SHAPE::kStages; ++stage) {
    init_barrier(barriers + 8 * stage, 1);
    init_barrier(barriers + 8 * (stage + SHAPE::kStages), SHAPE::kWarps);
  }
  for (int entry = 0; entry < SHAPE::kQueueEntries; ++entry) init_barrier(mailbox + 8 * entry, 1);
  publish_barriers();
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 1) skinny_gemm_kernel(const __grid_constant__ SkinnyGemmParams p) {
  extern __shared__ __align__(128) char memory[];
  const uint32_t ring = shared_address(memory), barriers = ring + SHAPE::kBarrierOffset;
  const uint32_t mailbox = ring + SHAPE::kQueueOffset;
  start_dependents();
  if (threadIdx.x == 0) init_barriers<SHAPE>(barriers, mailbox);
  __syncthreads();
  PassSource<SHAPE> passes{p, mailbox, reinterpret_cast<int*>(memory + SHAPE::kQueueOffset + 8 * SHAPE::kQueueEntries)};
  if (threadIdx.x / 32 >= SHAPE::kWarps) {
    produce<SHAPE>(p, ring, barriers, passes);
    return;
  }
  await_previous();
  Consumer<SHAPE> consumer{p, ring, barriers};
  const Epilogue<SHAPE> epilogue{p, reinterpret_cast<float4*>(memory + SHAPE::kSumOffset)};
  consumer.load();
  WorkRange pass;
#pragma unroll 1
  while (passes.next(pass)) {
    Sums<SHAPE> sums;
    sums.clear();
    consumer.consume_pass(pass, sums);
    epilogue.write(pass, sums);
  }
}

template <int TILES, int COLUMNS, bool IS_GATED, bool IS_RESIDENT>
cudaError_t launch_variant(const SkinnyGemmParams& params, cudaStream_t stream) {
  using Shape = SkinnyGemmShape<SLIPSTREAM_WEIGHTS<SLIPSTREAM_OPERAND>, TILES, COLUMNS, IS_GATED, IS_RESIDENT>;
  return launch_shape<Shape, skinny_gemm_kernel<Shape>>(params, params.num_ctas, stream);
}

template <int TILES, int COLUMNS, bool IS_RESIDENT>
cudaError_t launch_gated(const SkinnyGemmParams& params, cudaStream_t stream) {
  if (params.is_gated != 0) return launch_variant<TILES, COLUMNS, true, IS_RESIDENT>(params, stream);
  return launch_variant<TILES, COLUMNS, false, IS_RESIDENT>(params, stream);
}

template <int TILES>
cudaError_t launch_tiles(const SkinnyGemmParams& params, cudaStream_t stream) {
  if constexpr (TILES <= 3) {
    if (params.is_resident != 0) return launch_gated<TILES, 1, true>(params, stream);
  }
  if (params.columns == 1) return launch_gated<TILES, 1, false>(params, stream);
  if (params.columns == 2) return launch_gated<TILES, 2, false>(params, stream);
  return cudaErrorInvalidValue;
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_skinny_gemm(const SkinnyGemmParams* params, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (params->tiles == 2) return slipstream::launch_tiles<2>(*params, cuda_stream);
  if (params->tiles == 3) return slipstream::launch_tiles<3>(*params, cuda_stream);
  if (params->tiles == 4) return slipstream::launch_tiles<4>(*params, cuda_stream);
  return cudaErrorInvalidValue;
}
