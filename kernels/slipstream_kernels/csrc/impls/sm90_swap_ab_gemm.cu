// Products of some tens to hundreds of tokens with large weights, for Hopper (sm_90a): y = x W^T.
// Contract: gemm/swap_ab_gemm.py.
//
// Weights are the A operand (64 rows a wgmma) and tokens the B operand, so that few tokens waste little. One persistent
// CTA an SM: producer warps fill a ring with weights and activations by TMA (swap_ab_load.cuh), two consumer warpgroups
// multiply (swap_ab_multiply.cuh). Where outputs are narrow, the CTAs of a cluster split the summed dimension, so that each
// still reads activations for many weight rows, and add their sums through each other's shared memory
// (swap_ab_epilogue.cuh). The kernel starts while the one before it still runs, and fills its ring with weights before it
// waits for that kernel's results. Built once per SLIPSTREAM_OUTPUT (__half, __nv_bfloat16), SLIPSTREAM_TILES (a format of
// swap_ab_shape.cuh) and SLIPSTREAM_COLUMNS (tokens of a tile: 16, 32, 64, 128, 256).

#include <cuda.h>
#include <cuda_runtime.h>

#include "epilogue/swap_ab_epilogue.cuh"
#include "pipeline/swap_ab_load.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"
#include "host/tensor_map.h"

namespace slipstream {

constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

template <typename SHAPE>
__device__ __forceinline__ void run_consumer(const SwapAbParams& p, const SwapAbMemory<SHAPE>& memory,
                                             const SwapAbWork<SHAPE>& work, int warpgroup) {
  SwapAbConsumer<SHAPE> consumer{p, memory, work, warpgroup};
  SwapAbEpilogue<SHAPE> epilogue{p, memory, work, warpgroup};
  if (threadIdx.x == 128) epilogue.expect_partial_sums();
  WorkRange units = work.units_of(0);
  epilogue.load_constants(units);
  if constexpr (SHAPE::kSplits > 1) wait_for_cluster();
  await_previous();
  epilogue.load_token_scales();
#pragma unroll 1
  for (int pass = 0; pass < work.num_passes; ++pass) {
    if (pass > 0) {
      units = work.units_of(pass);
      epilogue.load_constants(units);
    }
    SwapAbSums<SHAPE> sums;
    consumer.multiply_pass(units, sums);
    epilogue.write(units, sums);
  }
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 1)
    swap_ab_gemm_kernel(const __grid_constant__ SwapAbParams p, const __grid_constant__ SwapAbMaps maps) {
  extern __shared__ char shared[];
  start_dependents();
  const SwapAbWork<SHAPE> work(p);
  const SwapAbMemory<SHAPE> memory(shared_address(shared), work.max_units);
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  if constexpr (SHAPE::kSplits > 1) arrive_in_cluster();
  // One value for the whole warp, so that the branch below is seen to be uniform.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    lower_registers<kProducerRegisters>();
    if (threadIdx.x % 32 == 0) SwapAbProducer<SHAPE>{p, maps, memory, work, static_cast<int>(threadIdx.x / 32)}.run();
    if constexpr (SHAPE::kSplits > 1) wait_for_cluster();
  } else {
    raise_registers<kConsumerRegisters>();
    run_consumer<SHAPE>(p, memory, work, warpgroup - 1);
  }
  // No CTA ends while others may still write to it.
  if constexpr (SHAPE::kSplits > 1) {
    arrive_in_cluster();
    wait_for_cluster();
  }
}

template <typename SHAPE>
bool encode_maps(const SwapAbParams& p, SwapAbMaps* maps) {
  constexpr uint64_t kSize = sizeof(typename SHAPE::Product);
  constexpr auto kType = SHAPE::kIsFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const uint64_t columns = p.in_features, units = p.num_units, row = columns * kSize;
  // Strides: from a unit to its upper half, and to the next unit.
  const uint64_t half = SHAPE::kIsGated ? 8 * units * row : 8 * row, next = SHAPE::kIsGated ? 8 * row : 16 * row;
  Extent<4> weights{{columns, 8, 2, units}, {row, half, next}, {SHAPE::kChunk, 8, 2, 4}};
  if (!encode_tensor_map(&maps->weights, kType, CU_TENSOR_MAP_SWIZZLE_128B, p.weight, weights)) return false;
  weights.box[3] = 1;
  const Extent<2> tokens{{columns, static_cast<uint64_t>(p.num_tokens)},
                         {p.x_row_stride * kSize},
                         {SHAPE::kChunk, SHAPE::kColumns}};
  return encode_tensor_map(&maps->unit, kType, CU_TENSOR_MAP_SWIZZLE_128B, p.weight, weights) &&
         encode_tensor_map(&maps->tokens, kType, CU_TENSOR_MAP_SWIZZLE_128B, p.x, tokens);
}

// Clusters that run at once; so many are launched. Asks the driver once.
template <typename SHAPE>
cudaError_t count_clusters_at_once(int* num_clusters) {
  static int counted = 0;
  static const cudaError_t error = count_clusters<SHAPE, swap_ab_gemm_kernel<SHAPE>>(SHAPE::kSplits, &counted);
  *num_clusters = counted;
  return error;
}

// A cluster with splits has one pass. With fewer than two stages nothing would overlap.
template <typename SHAPE>
bool fits(int num_units, int num_clusters) {
  const int units = (num_units + num_clusters - 1) / num_clusters;
  const int passes = (units + SHAPE::kUnits - 1) / SHAPE::kUnits;
  return (SHAPE::kSplits == 1 || passes == 1) && SHAPE::stages((units + passes - 1) / passes) >= 2;
}

template <typename SHAPE>
cudaError_t launch(const SwapAbParams& p, cudaStream_t stream) {
  int num_clusters = 0;
  const cudaError_t counted = count_clusters_at_once<SHAPE>(&num_clusters);
  if (counted != cudaSuccess) return counted;
  SwapAbMaps maps;
  if (p.num_tokens > SHAPE::kColumns || !encode_maps<SHAPE>(p, &maps)) return cudaErrorInvalidValue;
  if (!fits<SHAPE>(p.num_units, num_clusters)) return cudaErrorInvalidConfiguration;
  const ClusterLaunch<SHAPE> launch(num_clusters, SHAPE::kSplits, p.is_dependent != 0, stream);
  return cudaLaunchKernelEx(&launch.config, swap_ab_gemm_kernel<SHAPE>, p, maps);
}

template <int TILES, int SPLITS, bool IS_GATED>
struct Variant {
  using Shape = SwapAbShape<SLIPSTREAM_TILES<SLIPSTREAM_OUTPUT>, SLIPSTREAM_COLUMNS, TILES, SPLITS, IS_GATED>;

  static bool is_wanted(const SwapAbParams& p) {
    return p.tiles == TILES && p.splits == SPLITS && (p.is_gated != 0) == IS_GATED;
  }
};

template <typename... VARIANTS>
struct Variants {
  static cudaError_t launch_wanted(const SwapAbParams& p, cudaStream_t stream) {
    cudaError_t error = cudaErrorInvalidValue;
    // Launches the first variant that is wanted.
    (void)((VARIANTS::is_wanted(p) && (error = launch<typename VARIANTS::Shape>(p, stream), true)) || ...);
    return error;
  }

  static int count_wanted(const SwapAbParams& p) {
    int count = 0;
    (void)((VARIANTS::is_wanted(p) && (count_clusters_at_once<typename VARIANTS::Shape>(&count), true)) || ...);
    return count;
  }
};

// The compiled variants; swap_ab_gemm.py mirrors the list.
#if SLIPSTREAM_COLUMNS == 16
using Compiled = Variants<Variant<1, 1, false>, Variant<2, 1, false>, Variant<1, 2, false>, Variant<2, 2, false>,
                          Variant<2, 1, true>>;
#elif SLIPSTREAM_COLUMNS == 256
using Compiled = Variants<Variant<1, 1, false>, Variant<1, 2, false>, Variant<1, 1, true>>;
#else
using Compiled = Variants<Variant<1, 1, false>, Variant<2, 1, false>, Variant<1, 2, false>, Variant<2, 2, false>,
                          Variant<1, 4, false>, Variant<2, 4, false>, Variant<2, 1, true>>;
#endif

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_swap_ab_gemm(const SwapAbParams* params, void* stream) {
  return slipstream::Compiled::launch_wanted(*params, static_cast<cudaStream_t>(stream));
}

// How many clusters of the variant run at once on this device; 0: none, or it is not compiled.
SLIPSTREAM_API int slipstream_count_clusters(const SwapAbParams* params) {
  return slipstream::Compiled::count_wanted(*params);
}
