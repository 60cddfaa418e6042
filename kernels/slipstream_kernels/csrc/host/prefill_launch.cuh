// The prefill kernel, and its launch.
#pragma once

#include <cuda_runtime.h>

#include "host/kernel_launch.h"
#include "pipeline/prefill_run.cuh"

namespace slipstream {

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 1)
    prefill_attention_kernel(const __grid_constant__ typename SHAPE::Params p,
                             const __grid_constant__ typename SHAPE::Maps maps) {
  extern __shared__ char shared[];
  run_prefill_attention<SHAPE>(p, maps, shared);
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
