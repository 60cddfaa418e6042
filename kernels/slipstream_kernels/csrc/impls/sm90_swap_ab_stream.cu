// FP8 products of 65 to 256 tokens with weights of long rows, for Hopper (sm_90a): y = x W^T, one scale a token and a
// weight row. Contract: gemm/swap_ab_gemm.py.
//
// As in sm90_swap_ab_gemm.cu weights are the A operand and tokens the B operand, the kernel starts while the one before it
// still runs, and fills its ring with weights before it waits for that kernel's results. There a CTA's share of a weight's
// rows follows from the number of CTAs; here tiles have the size that reads tokens least often, and the summed chunks of
// all tiles are shared out evenly (swap_ab_stream_shape.cuh). CTAs that share a tile add their sums through global memory
// (stream_epilogue.cuh). Built once per SLIPSTREAM_COLUMNS (tokens of a tile: 128, 256).

#include <cuda.h>
#include <cuda_runtime.h>

#include "epilogue/stream_epilogue.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"
#include "host/tensor_map.h"
#include "mma/swap_ab_stream_multiply.cuh"
#include "pipeline/swap_ab_stream_load.cuh"

namespace slipstream {

template <typename SHAPE>
__device__ __forceinline__ void run_consumer(const SwapAbStreamParams& p, const StreamMemory<SHAPE>& memory,
                                             const StreamWork& work, int warpgroup) {
  StreamConsumer<SHAPE> consumer{memory, warpgroup};
  StreamEpilogue<SHAPE, StreamMemory<SHAPE>, StreamWork> epilogue{p, memory, work, warpgroup};
  epilogue.load_weight_scales(work.runs.segment_at(work.begin, work.end).tile);
  await_previous();
  epilogue.load_token_scales();
#pragma unroll 1
  for (int position = work.begin; position < work.end;) {
    const StreamSegment segment = work.runs.segment_at(position, work.end);
    if (position > work.begin) epilogue.load_weight_scales(segment.tile);
    position += segment.end_chunk - segment.begin_chunk;
    StreamSums<SHAPE> sums;
    consumer.multiply(segment.end_chunk - segment.begin_chunk, sums);
    epilogue.write(segment, sums, position == work.end);
  }
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 1)
    swap_ab_stream_kernel(const __grid_constant__ SwapAbStreamParams p, const __grid_constant__ StreamMaps maps) {
  extern __shared__ char shared[];
  start_dependents();
  const StreamWork work(p);
  const StreamMemory<SHAPE> memory(shared_address(shared), stream_tile_units(p));
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  // One value for the whole warp, so that the branch below is seen to be uniform.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp >= SHAPE::kConsumerThreads / 32) {
    lower_registers<SHAPE::kProducerRegisters>();
    const StreamProducer<SHAPE> producer{p, maps, memory, work};
    const int thread = threadIdx.x - SHAPE::kConsumerThreads;
    if (thread == 0) producer.run_weights();
    if (thread == 32) producer.run_tokens();
  } else {
    raise_registers<SHAPE::kConsumerRegisters>();
    run_consumer<SHAPE>(p, memory, work, warp / 4);
  }
}

template <typename SHAPE>
bool encode_maps(const SwapAbStreamParams& p, StreamMaps* maps) {
  const uint64_t row = p.in_features;
  const Extent<2> weights{{row, 16 * static_cast<uint64_t>(p.num_units)},
                          {row},
                          {128, 16 * static_cast<uint32_t>(stream_tile_units(p))}};
  const Extent<2> tokens{{row, static_cast<uint64_t>(p.num_tokens)},
                         {static_cast<uint64_t>(p.x_row_stride)},
                         {128, SHAPE::kColumns}};
  constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return encode_tensor_map(&maps->weights, kType, CU_TENSOR_MAP_SWIZZLE_128B, p.weight, weights) &&
         encode_tensor_map(&maps->tokens, kType, CU_TENSOR_MAP_SWIZZLE_128B, p.x, tokens);
}

// Runs are not empty, tiles fit a CTA, and products of StreamRuns fit 32 bits.
template <typename SHAPE>
bool fits(const SwapAbStreamParams& p) {
  if (p.num_tokens > SHAPE::kColumns || p.num_tiles < 1 || p.num_tiles > p.num_units || p.num_ctas < 1) return false;
  const int64_t num_chunks = (p.in_features + 127) / 128, total = p.num_tiles * num_chunks;
  const bool is_split = p.num_tiles % p.num_ctas != 0;
  return stream_tile_units(p) <= SHAPE::kUnits && p.num_ctas <= total &&
         (total + 1) * (p.num_ctas + int64_t{1}) < (int64_t{1} << 32) &&
         static_cast<int64_t>(p.num_units) * (p.num_tiles + int64_t{1}) < (int64_t{1} << 32) &&
         (!is_split || (p.partial_sums != nullptr && p.counters != nullptr));
}

template <typename SHAPE>
cudaError_t launch(const SwapAbStreamParams& p, cudaStream_t stream) {
  const cudaError_t allowed = allow_shared_memory<swap_ab_stream_kernel<SHAPE>, SHAPE::kTotalBytes>();
  if (allowed != cudaSuccess) return allowed;
  StreamMaps maps;
  if (!fits<SHAPE>(p)) return cudaErrorInvalidConfiguration;
  if (!encode_maps<SHAPE>(p, &maps)) return cudaErrorInvalidValue;
  return launch_kernel(p.is_dependent != 0, dim3(p.num_ctas), SHAPE::kThreads, SHAPE::kTotalBytes, stream,
                       swap_ab_stream_kernel<SHAPE>, p, maps);
}

using Compiled = StreamShape<SLIPSTREAM_COLUMNS>;

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_swap_ab_stream(const SwapAbStreamParams* params, void* stream) {
  return slipstream::launch<slipstream::Compiled>(*params, static_cast<cudaStream_t>(stream));
}

// How many CTAs run at once on this device; 0: none.
SLIPSTREAM_API int slipstream_count_ctas() {
  int count = 0;
  const cudaError_t error =
      slipstream::count_clusters<slipstream::Compiled, slipstream::swap_ab_stream_kernel<slipstream::Compiled>>(1, &count);
  return error == cudaSuccess ? count : 0;
}
