// Launches on the host. The rules of dependent ones: slipstream_kernels/dependent_launch.py.
#pragma once

#include <cuda_runtime.h>

namespace slipstream {

inline cudaLaunchConfig_t launch_config(dim3 grid, int threads, int shared_bytes, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return config;
}

// The kernel may come up before the one before it in the stream has ended.
inline cudaLaunchAttribute dependent_attribute() {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

template <typename... PARAMETERS, typename... ARGUMENTS>
cudaError_t launch_kernel(bool is_dependent, dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                          void (*kernel)(PARAMETERS...), ARGUMENTS&&... arguments) {
  cudaLaunchAttribute attribute = dependent_attribute();
  cudaLaunchConfig_t config = launch_config(grid, threads, shared_bytes, stream);
  config.attrs = &attribute;
  config.numAttrs = is_dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<PARAMETERS>(arguments)...);
}

// More than 48 KB of shared memory must be allowed before a kernel's first launch.
template <auto KERNEL, int BYTES>
cudaError_t allow_shared_memory() {
  static const cudaError_t allowed =
      cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
  return allowed;
}

// The same of a kernel of which an SM runs as many CTAs as its shared memory holds: as little as possible is left to L1.
template <auto KERNEL, int BYTES>
cudaError_t allow_shared_memory_of_all_ctas() {
  const cudaError_t allowed = allow_shared_memory<KERNEL, BYTES>();
  if (allowed != cudaSuccess) return allowed;
  static const cudaError_t preferred =
      cudaFuncSetAttribute(KERNEL, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  return preferred;
}

// SHAPE: has kThreads and kTotalBytes.
template <typename SHAPE, auto KERNEL, typename PARAMS>
cudaError_t launch_shape(const PARAMS& params, int num_ctas, cudaStream_t stream) {
  const cudaError_t allowed = allow_shared_memory<KERNEL, SHAPE::kTotalBytes>();
  if (allowed != cudaSuccess) return allowed;
  return launch_kernel(params.is_dependent != 0, dim3(num_ctas), SHAPE::kThreads, SHAPE::kTotalBytes, stream, KERNEL,
                       params);
}

// The same in clusters of CTAs.
template <typename SHAPE>
struct ClusterLaunch {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config;

  ClusterLaunch(int num_clusters, int cluster_size, bool is_dependent, cudaStream_t stream)
      : config(launch_config(dim3(num_clusters * cluster_size), SHAPE::kThreads, SHAPE::kTotalBytes, stream)) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = cluster_size;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1] = dependent_attribute();
    config.attrs = attributes;
    config.numAttrs = is_dependent ? 2 : 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;   // config points into it
};

// How many such clusters run at once.
template <typename SHAPE, auto KERNEL>
cudaError_t count_clusters(int cluster_size, int* count) {
  const cudaError_t allowed = allow_shared_memory<KERNEL, SHAPE::kTotalBytes>();
  if (allowed != cudaSuccess) return allowed;
  const ClusterLaunch<SHAPE> launch(1, cluster_size, false, nullptr);
  return cudaOccupancyMaxActiveClusters(count, KERNEL, &launch.config);
}

}  // namespace slipstream
