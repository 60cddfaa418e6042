// Products of up to 256 16-bit tokens with int8 weights, for Hopper (sm_90a). Contract: gemm/int8_mm.py.
//
// One persistent CTA an SM, or a cluster of them, owns strips of output features (mixed_gemm_shape.cuh). A warp fills a ring
// with weights and tokens (mixed_gemm_load.cuh), four warpgroups expand weights into operands in registers and multiply
// (mixed_gemm_multiply.cuh), and sums meet in shared memory (mixed_gemm_epilogue.cuh). The kernel starts while the one before
// it still runs, and fills its ring with weights meanwhile. Built once per SLIPSTREAM_FORMAT (mixed_gemm_formats.cuh) and
// SLIPSTREAM_COLUMNS (tokens of a tile).

#include "ptx/dependent_launch.cuh"
#include "epilogue/mixed_gemm_epilogue.cuh"
#include "pipeline/mixed_gemm_load.cuh"
#include "mma/mixed_gemm_multiply.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"
#include "host/tensor_map.h"

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

template <typename SHAPE>
__device__ __forceinline__ void multiply_passes(const MixedGemmParams& p, const MixedGemmMemory<SHAPE>& memory,
                                                const MixedGemmShare<SHAPE>& share, int warpgroup) {
  MixedGemmConsumer<SHAPE> multiplier{memory, share, warpgroup % SHAPE::kWarpgroupsM, warpgroup / SHAPE::kWarpgroupsM};
  const MixedGemmEpilogue<SHAPE> epilogue{p, memory, share};
  epilogue.load_rows(0);
  await_previous();
#pragma unroll 1
  for (int pass = 0; pass < share.num_passes; ++pass) {
    if (pass > 0) epilogue.load_rows(pass);
    float sums[SHAPE::kSums] = {};
    multiplier.multiply_pass(share.pass_begin(pass + 1) - share.pass_begin(pass), sums);
    epilogue.write(pass, sums);
  }
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 1)
    mixed_gemm_kernel(const __grid_constant__ MixedGemmParams p, const __grid_constant__ MixedGemmMaps maps) {
  extern __shared__ char shared[];
  start_dependents();
  if (threadIdx.x == SHAPE::kConsumers) prefetch_map(&maps.tokens);
  const MixedGemmMemory<SHAPE> memory(shared_address(shared));
  const MixedGemmShare<SHAPE> share(p);
  init_memory(memory);
  // One value for the whole warp, so that the branch below is seen to be uniform.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == SHAPE::kWarpgroups) {
    lower_registers<SHAPE::kLoaderRegisters>();
    if (threadIdx.x / 32 == SHAPE::kWarps) MixedGemmProducer<SHAPE>{p, maps, memory, share}.run();
    return;
  }
  raise_registers<SHAPE::kMultiplierRegisters>();
  multiply_passes<SHAPE>(p, memory, share, warpgroup);
}

// Strips of 16 rows of weights, of which the second eight are far from the first where they are gate and up.
inline bool encode_weights(const MixedGemmParams& p, uint32_t strips, CUtensorMap* map) {
  const uint64_t row = p.in_features, eight = 8 * row, count = p.out_features / 16;
  const uint64_t half = p.is_gated != 0 ? p.out_features / 2 * row : eight, strip = p.is_gated != 0 ? eight : 2 * eight;
  const Extent<4> extent{{row, 8, 2, count}, {row, half, strip}, {128, 8, 2, strips}};
  return encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, p.values, extent);
}

// False if the driver refuses.
template <typename SHAPE>
bool encode_maps(const MixedGemmParams& p, MixedGemmMaps* maps) {
  constexpr uint32_t kRow = 128 / sizeof(typename SHAPE::Operand);
  const uint64_t slabs = p.in_features / 128 * SHAPE::kSlabs, tokens = p.num_tokens;
  const Extent<3> rows{{kRow, tokens, slabs},
                       {static_cast<uint64_t>(p.x_row_stride), 128},
                       {kRow, SHAPE::kColumns, SHAPE::kBlocks * SHAPE::kSlabs}};
  return encode_weights(p, 4, &maps->four_strips) && encode_weights(p, 1, &maps->one_strip) &&
         encode_tensor_map(&maps->tokens, CU_TENSOR_MAP_DATA_TYPE_UINT16, CU_TENSOR_MAP_SWIZZLE_128B, p.x, rows);
}

template <typename SHAPE>
cudaError_t launch(const MixedGemmParams& p, cudaStream_t stream) {
  const cudaError_t allowed = allow_shared_memory<mixed_gemm_kernel<SHAPE>, SHAPE::kTotalBytes>();
  if (allowed != cudaSuccess) return allowed;
  MixedGemmMaps maps = {};
  if (!encode_maps<SHAPE>(p, &maps)) return cudaErrorInvalidValue;
  const ClusterLaunch<SHAPE> launch(p.num_clusters, p.splits, p.is_dependent != 0, stream);
  return cudaLaunchKernelEx(&launch.config, mixed_gemm_kernel<SHAPE>, p, maps);
}

// Sums are exchanged where the ring was, so then there is one pass.
template <typename SHAPE>
bool can_run(const MixedGemmParams& p) {
  if (p.token_tiles < 1 || p.num_clusters % p.token_tiles != 0) return false;
  const int strips = p.out_features / 16, parts = p.num_clusters / p.token_tiles;
  if (p.splits > p.in_features / 128 || p.num_tokens > p.token_tiles * SHAPE::kColumns) return false;
  if (parts < 1 || parts > strips) return false;
  return (SHAPE::kWarpgroupsK == 1 && p.splits == 1) || (strips + parts - 1) / parts <= SHAPE::kStrips;
}

// count: of clusters of p.splits CTAs that run at once; null to launch.
template <int WARPGROUPS_M>
cudaError_t run_variant(const MixedGemmParams& p, cudaStream_t stream, int* count) {
  using Shape = MixedGemmShape<SLIPSTREAM_FORMAT, SLIPSTREAM_COLUMNS, WARPGROUPS_M>;
  if constexpr (!Shape::kFits) {
    return cudaErrorInvalidConfiguration;
  } else {
    if (count != nullptr) return count_clusters<Shape, mixed_gemm_kernel<Shape>>(p.splits, count);
    return can_run<Shape>(p) ? launch<Shape>(p, stream) : cudaErrorInvalidConfiguration;
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

SLIPSTREAM_API int slipstream_fragment_clusters(const slipstream::MixedGemmParams* params, int* count) {
  return slipstream::run(*params, nullptr, count);
}
