// Products of many 16-bit tokens with 4-bit weights, for Hopper (sm_90a): y = x W^T. Contract: gemm/int4_mm.py.
//
// mixed_gemm makes operands of weights in the registers of the warps that multiply, which then wait for their own
// arithmetic. Here other warpgroups expand weights to shared memory (stream_w4a16_expand.cuh), once for 128 or 256 tokens, while
// tensor cores multiply those before. The chunks of all tiles are shared out evenly over the CTAs, which add the sums of
// tiles that they share through global memory (stream_epilogue.cuh). The kernel starts while the one before it still runs,
// and expands its first weights meanwhile. Built once per SLIPSTREAM_OPERAND, SLIPSTREAM_GROUPS (of 128 features, with
// scales of their own: 1, 2) and SLIPSTREAM_COLUMNS (tokens of a tile: 128, 160, 192,
// 224, 256).

#include <cuda.h>
#include <cuda_runtime.h>

#include "epilogue/stream_epilogue.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"
#include "host/tensor_map.h"
#include "mma/stream_w4a16_multiply.cuh"
#include "pipeline/stream_w4a16_expand.cuh"
#include "pipeline/stream_w4a16_load.cuh"
#include "ptx/dependent_launch.cuh"

namespace slipstream {

template <typename SHAPE>
using StreamW4A16Epilogue = StreamEpilogue<SHAPE, StreamW4A16Memory<SHAPE>, StreamInt4Work<SHAPE>>;

template <typename SHAPE>
__device__ __forceinline__ void run_consumer(const StreamW4A16Params& p, const StreamW4A16Memory<SHAPE>& memory,
                                             const StreamInt4Work<SHAPE>& work, int warpgroup) {
  StreamW4A16Consumer<SHAPE> consumer{memory, warpgroup};
  StreamW4A16Epilogue<SHAPE> epilogue{p, memory, work, warpgroup};
  await_previous();
#pragma unroll 1
  for (int position = work.begin; position < work.end;) {
    const StreamSegment segment = work.runs.segment_at(position, work.end);
    position += segment.end_chunk - segment.begin_chunk;
    StreamSums<SHAPE> sums;
    consumer.multiply(segment.end_chunk - segment.begin_chunk, sums);
    epilogue.load_weight_scales(segment.tile);   // not before: registers
    epilogue.write(segment, sums, position == work.end);
  }
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 1)
    stream_w4a16_kernel(const __grid_constant__ StreamW4A16Params p, const __grid_constant__ StreamW4A16Maps maps) {
  extern __shared__ char shared[];
  start_dependents();
  const StreamInt4Work<SHAPE> work(p);
  const StreamW4A16Memory<SHAPE> memory(shared_address(shared));
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  // One value for the whole warp, so that the branches below are seen to be uniform.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;
  if (warpgroup < 2) {
    raise_registers<SHAPE::kConsumerRegisters>();
    run_consumer<SHAPE>(p, memory, work, warpgroup);
  } else if (warpgroup < 2 + SHAPE::kSlabs) {
    lower_registers<SHAPE::kExpandRegisters>();
    const StreamW4A16Expander<SHAPE> expander{memory, warpgroup - 2, warp % 4};
    expander.run(work.end - work.begin);
  } else {
    lower_registers<SHAPE::kProducerRegisters>();
    const StreamW4A16Producer<SHAPE> producer{p, maps, memory, work};
    if (threadIdx.x % 128 == 0) producer.run_codes();
    if (threadIdx.x % 128 == 32) producer.run_tokens();
  }
}

template <typename SHAPE>
bool encode_maps(const StreamW4A16Params& p, StreamW4A16Maps* maps) {
  const uint64_t features = p.in_features, blocks = features / 128;
  const Extent<2> tokens{{features, static_cast<uint64_t>(p.num_tokens)},
                         {static_cast<uint64_t>(p.x_row_stride)},
                         {64, SHAPE::kColumns}};
  const Extent<3> codes{{256, blocks, static_cast<uint64_t>(p.num_units)}, {1024, 1024 * blocks}, {256, 1, SHAPE::kUnits}};
  return encode_tensor_map(&maps->tokens, CU_TENSOR_MAP_DATA_TYPE_UINT16, CU_TENSOR_MAP_SWIZZLE_128B, p.x, tokens) &&
         encode_tensor_map(&maps->codes, CU_TENSOR_MAP_DATA_TYPE_UINT32, CU_TENSOR_MAP_SWIZZLE_NONE, p.qweight, codes);
}

template <typename SHAPE>
cudaError_t launch(const StreamW4A16Params& p, cudaStream_t stream) {
  const cudaError_t allowed = allow_shared_memory<stream_w4a16_kernel<SHAPE>, SHAPE::kTotalBytes>();
  if (allowed != cudaSuccess) return allowed;
  StreamW4A16Maps maps;
  if (!runs_fit<SHAPE>(p)) return cudaErrorInvalidConfiguration;
  if (!encode_maps<SHAPE>(p, &maps)) return cudaErrorInvalidValue;
  return launch_kernel(p.is_dependent != 0, dim3(p.num_ctas), SHAPE::kThreads, SHAPE::kTotalBytes, stream,
                       stream_w4a16_kernel<SHAPE>, p, maps);
}

using Compiled = StreamW4A16Shape<SLIPSTREAM_OPERAND, SLIPSTREAM_GROUPS, SLIPSTREAM_COLUMNS>;

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_stream_w4a16(const StreamW4A16Params* params, void* stream) {
  return slipstream::launch<slipstream::Compiled>(*params, static_cast<cudaStream_t>(stream));
}

// How many CTAs run at once on this device; 0: none.
SLIPSTREAM_API int slipstream_count_ctas() {
  int count = 0;
  const cudaError_t error =
      slipstream::count_clusters<slipstream::Compiled, slipstream::stream_w4a16_kernel<slipstream::Compiled>>(1, &count);
  return error == cudaSuccess ? count : 0;
}
