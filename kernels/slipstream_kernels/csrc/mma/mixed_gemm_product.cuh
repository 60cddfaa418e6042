// What a CTA of the mixed-input product does: two warps bring its weights and tokens, warpgroups multiply them.
#pragma once

#include "ptx/dependent_launch.cuh"
#include "epilogue/mixed_gemm_epilogue.cuh"
#include "pipeline/mixed_gemm_load.cuh"
#include "mma/mixed_gemm_multiply.cuh"

namespace slipstream {

template <typename SHAPE>
__device__ __forceinline__ void init_memory(const MixedGemmMemory<SHAPE>& memory) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < SHAPE::kStages; ++stage) {
      init_barrier(memory.full(stage), 1);
      init_barrier(memory.empty(stage), SHAPE::kWarps);
    }
    publish_barriers();
  }
  __syncthreads();
}

template <typename SHAPE, typename OUT>
__device__ __forceinline__ void multiply_passes(const MixedGemmParams& p, const MixedGemmMemory<SHAPE>& memory,
                                                const MixedGemmWork<SHAPE>& work, int warpgroup) {
  MixedGemmConsumer<SHAPE> consumer{memory, work, warpgroup % SHAPE::kWarpgroupsM, warpgroup / SHAPE::kWarpgroupsM};
  const MixedGemmEpilogue<SHAPE, OUT> epilogue{p, memory, work};
  epilogue.load_rows(0);
  await_previous();
#pragma unroll 1
  for (int pass = 0; pass < work.num_passes; ++pass) {
    if (pass > 0) epilogue.load_rows(pass);
    epilogue.load_tokens(pass);
    float sums[SHAPE::kSums] = {};
    consumer.multiply_pass(work.pass_begin(pass + 1) - work.pass_begin(pass), sums);
    epilogue.write(pass, sums);
  }
}

template <typename SHAPE>
__device__ __forceinline__ void multiply_mixed_gemm(const MixedGemmParams& p, const MixedGemmMaps& maps, char* shared) {
  start_dependents();
  if (threadIdx.x == SHAPE::kConsumers) prefetch_map(&maps.tokens);
  const MixedGemmMemory<SHAPE> memory(shared_address(shared));
  const MixedGemmWork<SHAPE> work(p);
  init_memory(memory);
  // One value for the whole warp, so that the branch below is seen to be uniform.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == SHAPE::kWarpgroups) {
    lower_registers<SHAPE::kProducerRegisters>();
    const MixedGemmProducer<SHAPE> producer{p, maps, memory, work};
    if (threadIdx.x / 32 == SHAPE::kWarps) producer.run();
    if (threadIdx.x / 32 == SHAPE::kWarps + 1) producer.run_first_tokens();
    return;
  }
  raise_registers<SHAPE::kConsumerRegisters>();
  if constexpr (SHAPE::kIsInPairs) {
    multiply_passes<SHAPE, __nv_bfloat16>(p, memory, work, warpgroup);
  } else if constexpr (!SHAPE::kIsE4m3) {
    multiply_passes<SHAPE, typename SHAPE::Operand>(p, memory, work, warpgroup);
  } else if (p.out_is_half != 0) {
    multiply_passes<SHAPE, __half>(p, memory, work, warpgroup);
  } else {
    multiply_passes<SHAPE, __nv_bfloat16>(p, memory, work, warpgroup);
  }
}

}  // namespace slipstream
