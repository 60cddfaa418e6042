// Attention of many verify rows (trees of drafts) over a paged KV cache of 16 bits or e4m3, for Hopper (sm_90a).
// Contract: attention/decode_attention.py, which has this beside the kernel for few rows.
//
// Rows are (token, query head of one kv head) pairs; 64 of them are the tall side of a warpgroup's products, so the keys
// of a tree of 64 tokens are read `group` times and not twice as often. The CTAs of a cluster share the keys of a tile
// and add their sums up in each other's shared memory: nothing goes through global memory in between.
//
// Built once per SLIPSTREAM_TYPE (__half, __nv_bfloat16) and SLIPSTREAM_KV (KvType: 0, 1).

#include <cuda_runtime.h>

#include "host/kernel_launch.h"
#include "host/library.h"
#include "pipeline/verify_run.cuh"

namespace slipstream {

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 2)
    verify_attention_kernel(const __grid_constant__ VerifyParams p) {
  start_dependents();
  extern __shared__ __align__(kSwizzleUnit) char shared[];
  run_verify_attention<SHAPE>(p, shared);
}

// Clusters of more than 8 CTAs must be allowed, for not every GPU has them.
template <typename SHAPE>
cudaError_t allow_wide_clusters() {
  static const cudaError_t allowed = cudaFuncSetAttribute(verify_attention_kernel<SHAPE>,
                                                          cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  return allowed;
}

template <typename SHAPE>
cudaError_t launch(const VerifyParams& p, cudaStream_t stream) {
  const cudaError_t allowed = allow_shared_memory<verify_attention_kernel<SHAPE>, SHAPE::kTotalBytes>();
  if (allowed != cudaSuccess) return allowed;
  if (p.splits > 8 && allow_wide_clusters<SHAPE>() != cudaSuccess) return allow_wide_clusters<SHAPE>();
  const ClusterLaunch<SHAPE> launch(p.num_requests * p.num_kv_heads * p.row_tiles, p.splits, p.is_dependent != 0, stream);
  return cudaLaunchKernelEx(&launch.config, verify_attention_kernel<SHAPE>, p);
}

}  // namespace slipstream

using Shape = slipstream::VerifyShape<SLIPSTREAM_TYPE, static_cast<slipstream::KvType>(SLIPSTREAM_KV)>;

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_verify_attention(const VerifyParams* params, void* stream) {
  return slipstream::launch<Shape>(*params, static_cast<cudaStream_t>(stream));
}

// How many clusters of so many CTAs run at once on this device; 0: none.
SLIPSTREAM_API int slipstream_count_clusters(int splits) {
  int count = 0;
  if (splits > 8 && slipstream::allow_wide_clusters<Shape>() != cudaSuccess) return 0;
  const auto error = slipstream::count_clusters<Shape, slipstream::verify_attention_kernel<Shape>>(splits, &count);
  return error == cudaSuccess ? count : 0;
}
