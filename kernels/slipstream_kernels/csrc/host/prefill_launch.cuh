// The prefill kernel, and its launch: a CTA has one loading warp (prefill_load.cuh), for a quantised cache a warpgroup that
// converts what was loaded, and those that multiply.
#pragma once

#include <cuda_runtime.h>

#include "host/kernel_launch.h"
#include "mma/prefill_consumer.cuh"
#include "mma/prefill_fp8_consumer.cuh"
#include "pipeline/prefill_convert.cuh"
#include "pipeline/prefill_load.cuh"

namespace slipstream {

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 1)
    prefill_attention_kernel(const __grid_constant__ typename SHAPE::Params p,
                             const __grid_constant__ typename SHAPE::Maps maps) {
  extern __shared__ char shared[];
  const PrefillMemory<SHAPE> memory(shared);
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  // One value for the whole warp, so that the branch below is seen to be uniform.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    lower_registers<SHAPE::kLoadRegisters>();
    if (threadIdx.x / 32 == 0) PrefillLoader<SHAPE>{p, maps, memory}.run();
  } else if (warpgroup < SHAPE::kFirstMultiplier) {
    if constexpr (SHAPE::kIsConverted) {
      lower_registers<SHAPE::kConvertRegisters>();
      PrefillConverter<SHAPE>{memory}.run();
    }
  } else {
    raise_registers<SHAPE::kRegisters>();
    using Consumer = std::conditional_t<SHAPE::kHasFp8Values, PrefillFp8Consumer<SHAPE>, PrefillConsumer<SHAPE>>;
    Consumer{{p, memory, warpgroup - SHAPE::kFirstMultiplier}}.run();
  }
}

// ENCODER: makes the maps of the launch from its arguments.
template <typename SHAPE, typename ENCODER>
cudaError_t launch_prefill(const typename SHAPE::Params& p, cudaStream_t stream) {
  typename SHAPE::Maps maps;
  if (!ENCODER{p}.run(&maps)) return cudaErrorInvalidValue;
  constexpr int kBytes = PrefillMemory<SHAPE>::kAllocatedBytes;
  const cudaError_t allowed = allow_shared_memory<prefill_attention_kernel<SHAPE>, kBytes>();
  if (allowed != cudaSuccess) return allowed;
  prefill_attention_kernel<SHAPE><<<p.num_sms, SHAPE::kThreads, kBytes, stream>>>(p, maps);
  return cudaGetLastError();
}

}  // namespace slipstream
