// Products of few tokens with weights of 4 or 8 bits that become operands in registers, for Hopper (sm_90a).
// Contracts: gemm/int8_mm.py (W8A16), gemm/int4_mm.py (W4A16, W4A8).
//
// One persistent CTA an SM, or a cluster of them, owns tiles of output features (mixed_gemm_shape.cuh). Two warps fill a
// ring with weights and tokens (mixed_gemm_load.cuh), warpgroups expand weights into operands in registers and multiply
// (mixed_gemm_multiply.cuh), and sums meet in shared memory (mixed_gemm_epilogue.cuh). The kernel starts while the one
// before it still runs, and fills its ring with weights meanwhile. Built once per SLIPSTREAM_FORMAT
// (of mixed_gemm_formats.cuh), SLIPSTREAM_OPERAND, SLIPSTREAM_GROUPS (of a block with scales of their own: 0, 1, 2) and
// SLIPSTREAM_COLUMNS (of products of a tile, one a token or two: 8, 16, 32, 48, 64, 96, 128).

#include "mma/mixed_gemm_product.cuh"
#include "pipeline/split_rows.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"
#include "host/tensor_map.h"

namespace slipstream {

using Format = SLIPSTREAM_FORMAT<SLIPSTREAM_OPERAND, SLIPSTREAM_GROUPS>;

template <typename FORMAT, int COLUMNS>
__global__ void __launch_bounds__(kPermuteThreads) permute_features_kernel(const __grid_constant__ MixedGemmParams p) {
  start_dependents();
  await_previous();
  permute_features<FORMAT, COLUMNS>(p);
}

template <typename FORMAT, int COLUMNS>
__global__ void __launch_bounds__(kSplitThreads) split_rows_kernel(const __grid_constant__ MixedGemmParams p) {
  start_dependents();
  await_previous();
  split_rows<FORMAT, COLUMNS>(p);
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kBoundThreads, 1)
    mixed_gemm_kernel(const __grid_constant__ MixedGemmParams p, const __grid_constant__ MixedGemmMaps maps) {
  extern __shared__ char shared[];
  multiply_mixed_gemm<SHAPE>(p, maps, shared);
}

// Tiles of 16 rows of weights, of which the second eight are far from the first where they are gate and up.
inline bool encode_weights(const MixedGemmParams& p, uint32_t tiles, CUtensorMap* map) {
  const uint64_t row = p.in_features, eight = 8 * row, count = p.out_features / 16;
  const uint64_t half = p.is_gated != 0 ? p.out_features / 2 * row : eight, tile = p.is_gated != 0 ? eight : 2 * eight;
  const Extent<4> extent{{row, 8, 2, count}, {row, half, tile}, {128, 8, 2, tiles}};
  return encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, p.qweight, extent);
}

// False if the driver refuses.
template <typename SHAPE>
bool encode_maps(const MixedGemmParams& p, MixedGemmMaps* maps) {
  constexpr uint32_t kElementBytes = sizeof(typename SHAPE::Operand), kRow = 128 / kElementBytes;
  constexpr bool kIsPermuted = Format::kOrder == WeightOrder::kTiles;
  const uint64_t slabs = p.in_features / kRow, tokens = SHAPE::kIsInPairs ? SHAPE::kColumns : p.num_tokens;
  const uint64_t stride = kIsPermuted ? uint64_t{kElementBytes} * p.in_features : p.x_row_stride;
  const Extent<3> rows{{kRow, tokens, slabs},
                       {stride, 128},
                       {kRow, SHAPE::kColumns, SHAPE::kBlocks * SHAPE::kSlabs}};
  if (SHAPE::kIsByRows && !(encode_weights(p, 4, &maps->four_tiles) && encode_weights(p, 1, &maps->one_tile))) return false;
  return encode_tensor_map(&maps->tokens, kElementBytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
                           CU_TENSOR_MAP_SWIZZLE_128B, kIsPermuted ? p.permuted_x : p.x, rows);
}

// Brings tokens into the order of the weights' registers.
template <typename SHAPE>
cudaError_t arrange_tokens(const MixedGemmParams& p, cudaStream_t stream) {
  const auto grid = [&](int threads, int features) {
    const int64_t items = int64_t{p.num_tokens} * (p.in_features / features);
    return dim3(static_cast<unsigned>((items + threads - 1) / threads));
  };
  if constexpr (SHAPE::kIsInPairs) {
    constexpr auto kSplit = split_rows_kernel<Format, SHAPE::kColumns>;
    return launch_kernel(p.is_dependent != 0, grid(kSplitThreads, kSplitFeatures), kSplitThreads, 0, stream, kSplit, p);
  } else {
    constexpr auto kPermute = permute_features_kernel<Format, SHAPE::kColumns>;
    return launch_kernel(p.is_dependent != 0, grid(kPermuteThreads, kPermuteFeatures), kPermuteThreads, 0, stream, kPermute, p);
  }
}

template <typename SHAPE>
cudaError_t launch(const MixedGemmParams& p, cudaStream_t stream) {
  const cudaError_t allowed = allow_shared_memory<mixed_gemm_kernel<SHAPE>, SHAPE::kTotalBytes>();
  if (allowed != cudaSuccess) return allowed;
  MixedGemmMaps maps = {};
  if (!encode_maps<SHAPE>(p, &maps)) return cudaErrorInvalidValue;
  if constexpr (Format::kOrder == WeightOrder::kTiles) {
    const cudaError_t arranged = arrange_tokens<SHAPE>(p, stream);
    if (arranged != cudaSuccess) return arranged;
  }
  const ClusterLaunch<SHAPE> launch(p.num_clusters, p.splits, p.is_dependent != 0, stream);
  return cudaLaunchKernelEx(&launch.config, mixed_gemm_kernel<SHAPE>, p, maps);
}

// Sums are exchanged where the ring was, so then there is one pass.
template <typename SHAPE>
bool can_run(const MixedGemmParams& p) {
  if (p.token_tiles < 1 || p.num_clusters % p.token_tiles != 0 || (!SHAPE::kHasTokenTiles && p.token_tiles != 1)) return false;
  if (p.is_gated != 0 && !SHAPE::kIsByRows) return false;
  const int tiles = p.out_features / 16, parts = p.num_clusters / p.token_tiles;
  if (p.splits > p.in_features / 128 || p.num_tokens > p.token_tiles * SHAPE::kTokens) return false;
  if (parts < 1 || parts > tiles) return false;
  return (SHAPE::kWarpgroupsK == 1 && p.splits == 1) || (tiles + parts - 1) / parts <= SHAPE::kTiles;
}

// count: of clusters of p.splits CTAs that run at once; null to launch.
template <int WARPGROUPS_M>
cudaError_t run_variant(const MixedGemmParams& p, cudaStream_t stream, int* count) {
  if constexpr (Format::kIsScaledInside && SLIPSTREAM_COLUMNS > 64 && WARPGROUPS_M > 2) {
    return cudaErrorInvalidConfiguration;   // two warpgroups are all
  } else {
    using Shape = MixedGemmShape<Format, SLIPSTREAM_COLUMNS, WARPGROUPS_M>;
    if constexpr (!Shape::kFits) {
      return cudaErrorInvalidConfiguration;
    } else {
      if (count != nullptr) return count_clusters<Shape, mixed_gemm_kernel<Shape>>(p.splits, count);
      return can_run<Shape>(p) ? launch<Shape>(p, stream) : cudaErrorInvalidConfiguration;
    }
  }
}

inline cudaError_t run(const MixedGemmParams& p, cudaStream_t stream, int* count) {
  switch (p.warpgroups_m) {
    case 1: return run_variant<1>(p, stream, count);
    case 2: return run_variant<2>(p, stream, count);
    case 4: return run_variant<4>(p, stream, count);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace slipstream

// Both return a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_mixed_gemm(const slipstream::MixedGemmParams* params, void* stream) {
  return slipstream::run(*params, static_cast<cudaStream_t>(stream), nullptr);
}

SLIPSTREAM_API int slipstream_mixed_gemm_clusters(const slipstream::MixedGemmParams* params, int* count) {
  return slipstream::run(*params, nullptr, count);
}
