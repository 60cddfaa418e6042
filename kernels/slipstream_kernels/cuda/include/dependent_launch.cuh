// Programmatic dependent launch. The rules that all kernels of a step keep: slipstream_kernels/dependent_launch.py.
#pragma once

#include <cuda_runtime.h>

namespace slipstream {

// The first instruction of a kernel: lets the next one come up once all CTAs of this one have called it or ended.
__device__ __forceinline__ void start_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// Ends when the kernel before has ended and what it wrote can be read. Every CTA calls it, also one without work.
__device__ __forceinline__ void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// is_dependent: let the kernel come up before the one before it in the stream has ended.
template <typename... PARAMETERS, typename... ARGUMENTS>
cudaError_t launch_kernel(bool is_dependent, dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                          void (*kernel)(PARAMETERS...), ARGUMENTS&&... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = is_dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<PARAMETERS>(arguments)...);
}

}  // namespace slipstream
