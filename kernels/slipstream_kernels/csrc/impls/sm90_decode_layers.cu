// All layers of a decode step of 1 to 8 requests in one kernel, for Hopper (sm_90a). Contract: fused_decode/decode_layers.py.
//
// One CTA to an SM stays for the whole step; a layer is five phases that the whole grid ends together: qkv (its rows
// normalised by every CTA for itself), attention (rotation and storing of keys in it), o, gate and up, down. Weights and
// keys of all phases pass through one ring in shared memory (layers_shape.cuh), filled by four warps that await nobody
// (layers_produce.cuh): what kernels of their own lose at each end and beginning, the memory's pipeline running empty and
// full, is not lost here. Built once per SLIPSTREAM_WEIGHTS (layers_formats.cuh) and SLIPSTREAM_KV_BYTES.

#include <cuda_runtime.h>

#include <type_traits>

#include "host/kernel_launch.h"
#include "decode_layers/layers_step.cuh"
#include "host/library.h"

namespace slipstream {

template <typename FORMAT, int KV_BYTES>
__global__ void __launch_bounds__(LayersShape<FORMAT>::kThreads, 1)
    decode_layers_kernel(const __grid_constant__ LayersParams p) {
  extern __shared__ __align__(128) char memory[];
  run_step<FORMAT, KV_BYTES>(p, LayersMemory<FORMAT>{memory});
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_decode_layers(const slipstream::LayersParams* params, void* stream) {
  using Shape = slipstream::LayersShape<slipstream::SLIPSTREAM_WEIGHTS>;
  constexpr auto kernel = slipstream::decode_layers_kernel<slipstream::SLIPSTREAM_WEIGHTS, SLIPSTREAM_KV_BYTES>;
  const cudaError_t allowed = slipstream::allow_shared_memory<kernel, Shape::kTotalBytes>();
  if (allowed != cudaSuccess) return allowed;
  cudaLaunchAttribute attribute = {};   // two grids that each hold half of the SMs would wait for ever
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config = slipstream::launch_config(dim3(params->num_ctas), Shape::kThreads, Shape::kTotalBytes,
                                                        static_cast<cudaStream_t>(stream));
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, *params);
}
