// Attention of decode and verify rows over a paged latent cache (MLA with absorbed projections), for Hopper (sm_90a).
// Contract: attention/latent_attention.py.
//
// All heads share the rows of the cache: 576 columns of a row are the key, the first 512 of them the value. 64 rows of
// (token, head) pairs are the tall side of the products, or, where there are no more than 32, keys are. How the
// keys are shared out: latent_work.cuh; the two warpgroups that multiply: latent_consumer.cuh, latent_narrow_consumer.cuh;
// what several CTAs share is added up by the last of them, or by a second kernel: latent_join.cuh, latent_merge.cuh. Of FP8 rows another warpgroup makes bf16 ones:
// latent_convert.cuh.

#include <cuda.h>
#include <cuda_runtime.h>

#include "epilogue/latent_merge.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"
#include "host/tensor_map.h"
#include "pipeline/latent_run.cuh"

namespace slipstream {

__global__ void __launch_bounds__(LatentShape::kThreads, 1)
    latent_attention_kernel(const __grid_constant__ LatentParams p, const __grid_constant__ LatentMaps maps) {
  start_dependents();
  extern __shared__ __align__(kSwizzleUnit) char shared[];
  run_latent_attention(p, maps, LatentMemoryOf(shared));
}

__global__ void __launch_bounds__(LatentMerge::kThreads) latent_merge_kernel(const __grid_constant__ LatentParams p) {
  start_dependents();
  __shared__ float weights[LatentMerge::kMostParts], partials[LatentMerge::kThreads / 16];
  await_previous();
  LatentMerge{p, weights, partials}.run(blockIdx.x);
}

// Boxes of 64 rows; `columns` of the type, of rows of row_bytes.
bool encode_columns(CUtensorMap* map, CUtensorMapDataType type, CUtensorMapSwizzle swizzle, const char* data,
                    int64_t num_rows, uint64_t columns, uint32_t box) {
  const Extent<2> rows{{columns, static_cast<uint64_t>(num_rows)}, {LatentShape::kFp8RowBytes}, {box, 64}};
  return encode_tensor_map(map, type, swizzle, data, rows);
}

bool encode_fp8_rows(LatentMaps* maps, const void* cache, int64_t num_rows) {
  using Shape = LatentShape;
  const char* data = static_cast<const char*>(cache);
  return encode_columns(&maps->cache, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_NONE, data, num_rows,
                        Shape::kValueDim, Shape::kScaleColumns) &&
         encode_columns(&maps->scales, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_SWIZZLE_NONE,
                        data + Shape::kValueDim, num_rows, Shape::kScales, Shape::kScales) &&
         encode_columns(&maps->rope, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B,
                        data + Shape::kRopeOffset, num_rows, 64, 64);
}

// What L2 reads for a box of 64 columns: of 16-bit rows for 64 rows of queries 128 bytes were up to 4 % faster than 256.
constexpr CUtensorMapL2promotion kPromotion =
    LatentShape::kRows == 64 && !LatentShape::kIsFp8 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;

bool encode_rows(CUtensorMap* map, const void* data, int64_t num_rows, uint32_t box) {
  const Extent<2> rows{{LatentShape::kKeyDim, static_cast<uint64_t>(num_rows)},
                       {LatentShape::kKeyDim * sizeof(uint16_t)},
                       {64, box}};
  return encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, data, rows, kPromotion);
}

// For 64 rows of queries: two slabs of latents a copy.
bool encode_slabs(LatentMaps* maps, const void* cache, int64_t num_rows) {
  const uint64_t rows = static_cast<uint64_t>(num_rows);
  const Extent<3> slabs{{64, rows, LatentShape::kSlabs}, {LatentShape::kRowBytes, kSwizzleBytes}, {64, LatentShape::kKeys, 2}};
  return encode_tensor_map(&maps->cache, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, cache, slabs, kPromotion) &&
         encode_rows(&maps->rope, cache, num_rows, LatentShape::kKeys);
}

bool encode_cache(LatentMaps* maps, const void* cache, int64_t num_rows) {
  if constexpr (LatentShape::kIsFp8) return encode_fp8_rows(maps, cache, num_rows);
  if constexpr (LatentShape::kRows == 64) return encode_slabs(maps, cache, num_rows);
  return encode_rows(&maps->cache, cache, num_rows, LatentShape::kKeys);
}

cudaError_t launch(const LatentParams& p, cudaStream_t stream) {
  LatentMaps maps;
  if (p.num_requests > LatentMemoryOf::kMostRequests || p.num_shares > LatentMerge::kMostParts ||
      !encode_rows(&maps.q, p.q, int64_t{p.num_tokens} * p.num_heads, LatentShape::kRows) ||
      !encode_cache(&maps, p.latent_cache, p.num_blocks << p.block_size_log2)) {
    return cudaErrorInvalidValue;
  }
  constexpr int kBytes = LatentMemoryOf::kTotalBytes;
  const cudaError_t allowed = allow_shared_memory<latent_attention_kernel, kBytes>();
  if (allowed != cudaSuccess) return allowed;
  const cudaError_t attended =
      launch_kernel(p.is_dependent != 0, dim3(p.num_shares * p.num_lanes), LatentShape::kThreads, kBytes, stream,
                    latent_attention_kernel, p, maps);
  if (attended != cudaSuccess || p.arrivals != nullptr) return attended;
  return launch_kernel(p.is_dependent != 0, dim3(p.num_tokens * p.num_heads), LatentMerge::kThreads, 0, stream,
                       latent_merge_kernel, p);
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_latent_attention(const LatentParams* params, void* stream) {
  return slipstream::launch(*params, static_cast<cudaStream_t>(stream));
}
