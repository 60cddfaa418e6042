// FP8 products of some tens to hundreds of tokens with large weights, for Hopper (sm_90a): y = x W^T, one scale a token
// and a weight row. Contract: gemm/swap_ab_gemm.py.
//
// As in sm90_swap_ab_gemm.cu weights are the A operand and tokens the B operand, the kernel starts while the one before it
// still runs, and fills its ring with weights before it waits for that kernel's results. There a CTA's share of a weight's
// rows follows from the number of CTAs; here tiles have the size that reads tokens least often, and the summed chunks of
// all tiles are shared out evenly (swap_ab_stream_shape.cuh). CTAs that share a tile add their sums through global memory
// (swap_ab_stream_epilogue.cuh). Built once per SLIPSTREAM_COLUMNS (tokens of a tile: 64, 128, 256).

#include <cuda.h>
#include <cuda_runtime.h>

#include "epilogue/swap_ab_stream_epilogue.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"
#include "host/tensor_map.h"
#include "pipeline/swap_ab_stream_load.cuh"

namespace slipstream {

template <typename SHAPE>
__device__ __forceinline__ void run_consumer(const SwapAbStreamParams& p, const StreamMemory<SHAPE>& memory,
                                             const StreamWork& work, int warpgroup) {
  StreamConsumer<SHAPE> consumer{memory, warpgroup};
  StreamEpilogue<SHAPE> epilogue{p, memory, work, warpgroup};
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
__global__ void __launch_bounds__(SHAPE::kThreads, SHAPE::kCtasPerSm)
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
  const uint64_t row = p.in_features, units = p.num_units;
  // Strides: from a unit to its upper half, and to the next unit.
  const uint64_t half = SHAPE::kIsGated ? 8 * units * row : 8 * row, next = SHAPE::kIsGated ? 8 * row : 16 * row;
  const Extent<4> weights{{row, 8, 2, units},
                          {row, half, next},
                          {128, 8, 2, static_cast<uint32_t>(stream_tile_units(p))}};
  const Extent<2> tokens{{row, static_cast<uint64_t>(p.num_tokens)},
                         {static_cast<uint64_t>(p.x_row_stride)},
                         {128, SHAPE::kColumns}};
  constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return encode_tensor_map(&maps->weights, kType, CU_TENSOR_MAP_SWIZZLE_128B, p.weight, weights) &&
         encode_tensor_map(&maps->tokens, kType, CU_TENSOR_MAP_SWIZZLE_128B, p.x, tokens);
}

// CTAs that run at once, at most one an SM. Asks the driver once.
template <typename SHAPE>
cudaError_t count_ctas_at_once(int* num_ctas) {
  static int counted = 0;
  static const cudaError_t error = count_clusters<SHAPE, swap_ab_stream_kernel<SHAPE>>(1, &counted);
  *num_ctas = counted / SHAPE::kCtasPerSm;
  return error;
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

template <int WARPGROUPS, int TILES>
struct Variant {
  template <bool IS_GATED>
  using Shape = StreamShape<SLIPSTREAM_COLUMNS, WARPGROUPS, TILES, IS_GATED>;

  static bool is_wanted(const SwapAbStreamParams& p) { return p.warpgroups == WARPGROUPS; }

  static cudaError_t run(const SwapAbStreamParams& p, cudaStream_t stream) {
    return p.is_gated ? launch<Shape<true>>(p, stream) : launch<Shape<false>>(p, stream);
  }
};

template <typename... VARIANTS>
struct Variants {
  static cudaError_t launch_wanted(const SwapAbStreamParams& p, cudaStream_t stream) {
    cudaError_t error = cudaErrorInvalidValue;
    (void)((VARIANTS::is_wanted(p) && (error = VARIANTS::run(p, stream), true)) || ...);
    return error;
  }

  static int count_wanted(const SwapAbStreamParams& p) {
    int count = 0;
    (void)((VARIANTS::is_wanted(p) &&
            (count_ctas_at_once<typename VARIANTS::template Shape<false>>(&count), true)) || ...);
    return count;
  }
};

// The compiled variants; swap_ab_stream_choice.py mirrors the list.
#if SLIPSTREAM_COLUMNS == 64
using Compiled = Variants<Variant<1, 2>, Variant<2, 2>>;
#else
using Compiled = Variants<Variant<2, 1>>;
#endif

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_swap_ab_stream(const SwapAbStreamParams* params, void* stream) {
  return slipstream::Compiled::launch_wanted(*params, static_cast<cudaStream_t>(stream));
}

// How many CTAs of the variant run at once on this device, at most one an SM; 0: none, or it is not compiled.
SLIPSTREAM_API int slipstream_count_ctas(const SwapAbStreamParams* params) {
  return slipstream::Compiled::count_wanted(*params);
}
