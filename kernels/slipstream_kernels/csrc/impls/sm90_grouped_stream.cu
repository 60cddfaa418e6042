// Grouped products of few rows an expert, bf16 or FP8, for Hopper (sm_90a): y[r] = x[r] W^T with the weights of row r's expert,
// gated or not. Contract: moe/grouped_mm.py.
//
// Weights are the A operand and rows of x the B operand of warpgroup products. One CTA an SM goes through tiles of all experts
// with rows; its ring of weights runs on from one tile to the next, so the memory is asked for as much at the end of a tile
// as within it. Before the kernel before has ended, a CTA fills the ring with the weights that it is likely to need
// (GroupedGuess). Built once per SLIPSTREAM_COLUMNS (rows of a tile: 32, 64) and SLIPSTREAM_SCALES (kNone,
// kOfRows, kOfBlocks).

#include <cuda.h>
#include <cuda_runtime.h>

#include "epilogue/grouped_stream_epilogue.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"
#include "host/tensor_map.h"
#include "mma/grouped_stream_multiply.cuh"
#include "pipeline/grouped_stream_load.cuh"
#include "ptx/dependent_launch.cuh"

namespace slipstream {

// A warpgroup takes every other tile of the CTA.
template <typename SHAPE>
__device__ __forceinline__ void run_consumer(const GroupedStreamParams& p, const GroupedStreamMemory<SHAPE>& memory, int warpgroup) {
  const GroupedStreamConsumer<SHAPE> consumer{p, memory};
  GroupedStreamEpilogue<SHAPE> epilogue{p, memory, warpgroup};
  const int num_chunks = p.in_features / SHAPE::kChunk;
#pragma unroll 1
  for (int index = warpgroup;; index += SHAPE::kWarpgroups) {
    const GroupedTile tile = read_tile(memory, index);
    if (tile.num_rows == 0) return;
    epilogue.load_scales(tile);
    float sums[SHAPE::kHalves][SHAPE::kSums];
    consumer.multiply(tile, index, num_chunks, sums);
    epilogue.write(tile, sums);
  }
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 1)
    grouped_stream_kernel(const __grid_constant__ GroupedStreamParams p, const __grid_constant__ CUtensorMap weights) {
  extern __shared__ char shared[];
  start_dependents();
  const GroupedStreamMemory<SHAPE> memory{(shared_address(shared) + 1023) & ~1023u};
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  // One value for the whole warp, so that the branches below are seen to be uniform.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  constexpr int kConsumerWarps = SHAPE::kConsumers / 32;
  if (warp < kConsumerWarps) {
    await_previous();
    run_consumer<SHAPE>(p, memory, warp / 4);
  } else if (warp == kConsumerWarps) {
    GroupedWeightProducer<SHAPE>{p, weights, memory}.run();
  } else if (warp <= kConsumerWarps + SHAPE::kRowWarps) {
    await_previous();
    const int row_warp = warp - kConsumerWarps - 1;
    if (row_warp == 0) list_tiles(p, memory);
    GroupedRowProducer<SHAPE>{p, memory, row_warp}.run();
  }
}

// Weights as [experts][eights of features][gate, up][8][in_features]; a box: 128 rows of an expert. L2 reads what a box asks for
// and no more: with 256 bytes, of rows of which a box has 128, copies alone went through 738 MB in 177 us on an H200, and in 166
// with 128.
template <typename SHAPE>
bool encode_map(const GroupedStreamParams& p, CUtensorMap* map) {
  constexpr uint64_t kParts = SHAPE::kGated ? 2 : 1;
  const uint64_t row = p.in_features * sizeof(typename SHAPE::Operand), width = p.out_features / kParts;
  const Extent<5> weights{{static_cast<uint64_t>(p.in_features), 8, kParts, width / 8, static_cast<uint64_t>(p.num_experts)},
                          {row, width * row, 8 * row, p.out_features * row},
                          {SHAPE::kChunk, 8, kParts, SHAPE::kFeatures / 8, 1}};
  const auto type = SHAPE::kIsFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode_tensor_map(map, type, CU_TENSOR_MAP_SWIZZLE_128B, p.weight, weights, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

template <typename SHAPE>
cudaError_t launch(const GroupedStreamParams& p, cudaStream_t stream) {
  const cudaError_t allowed = allow_shared_memory<grouped_stream_kernel<SHAPE>, SHAPE::kTotalBytes>();
  if (allowed != cudaSuccess) return allowed;
  const int eights = SHAPE::kGated ? 16 : 8;
  const bool fits = p.num_experts >= 1 && p.num_experts <= SHAPE::kMaxExperts && p.out_features % eights == 0 &&
                    p.in_features % SHAPE::kChunk == 0 && p.num_ctas >= 1;
  CUtensorMap weights;
  if (!fits || !encode_map<SHAPE>(p, &weights)) return cudaErrorInvalidValue;
  return launch_kernel(p.is_dependent != 0, dim3(p.num_ctas), SHAPE::kThreads, SHAPE::kTotalBytes, stream,
                       grouped_stream_kernel<SHAPE>, p, weights);
}

template <bool GATED>
using Compiled = GroupedStreamShape<GroupedScales::SLIPSTREAM_SCALES, SLIPSTREAM_COLUMNS, GATED>;

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_grouped_stream(const slipstream::GroupedStreamParams* params, void* stream) {
  using namespace slipstream;
  const auto on = static_cast<cudaStream_t>(stream);
  return params->is_gated ? launch<Compiled<true>>(*params, on) : launch<Compiled<false>>(*params, on);
}
