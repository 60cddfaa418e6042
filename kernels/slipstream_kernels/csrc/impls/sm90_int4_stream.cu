// Products of up to 64 tokens with 4-bit weights, for Hopper (sm_90a). Contract: gemm/int4_mm.py.
//
// The bytes of the weights are the bound. One persistent CTA per SM streams an equal share of the blocks
// (int4_stream_shape.cuh) through a ring in shared memory, which one warp fills by bulk copies (int4_stream_load.cuh);
// four warpgroups multiply (int4_stream_multiply.cuh) and add and write sums (int4_stream_epilogue.cuh). A small kernel
// before puts the activations in order; this one starts while that still runs, and fills its ring with weights
// meanwhile. Built once per SLIPSTREAM_INPUT: __nv_bfloat16 or __half.

#include "ptx/dependent_launch.cuh"
#include "epilogue/int4_stream_epilogue.cuh"
#include "mma/int4_stream_multiply.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"

namespace slipstream {

template <typename SHAPE>
__global__ void __launch_bounds__(256) arrange_kernel(const __grid_constant__ Int4StreamParams p) {
  start_dependents();
  await_previous();
  arrange_block<SHAPE>(p);
}

template <typename SHAPE>
__device__ __forceinline__ void multiply_share(const Int4StreamParams& p, const Ring<SHAPE>& ring, char* memory) {
  const int thread = threadIdx.x;
  Multiplier<SHAPE> multiplier{ring, thread / 32 % SHAPE::kStrips, thread / SHAPE::kWriters, thread % 32};
  const TileEpilogue<SHAPE> epilogue{p, reinterpret_cast<float4*>(memory + SHAPE::kSumOffset),
                                     reinterpret_cast<int*>(memory + SHAPE::kBarrierOffset + 16 * SHAPE::kStages), thread};
  for (Share share(p, blockIdx.x); !share.is_done();) {
    const Segment segment = share.take();
    float sums[SHAPE::kSums] = {};
    multiplier.consume(segment.end - segment.begin, sums);
    epilogue.join(sums);
    if (thread >= SHAPE::kWriters || !epilogue.collect(segment, share.blocks, sums)) continue;
    epilogue.write(segment.tile, sums);
  }
}

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 1) int4_stream_kernel(const __grid_constant__ Int4StreamParams p) {
  extern __shared__ __align__(128) char memory[];
  const Ring<SHAPE> ring{shared_address(memory)};
  start_dependents();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < SHAPE::kStages; ++stage) {
      init_barrier(ring.full(stage), 1);
      init_barrier(ring.empty(stage), SHAPE::kConsumerWarps);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= SHAPE::kConsumers) {
    fill_stages<SHAPE>(p, ring);
    return;
  }
  await_previous();
  multiply_share<SHAPE>(p, ring, memory);
}

template <int COLUMNS, int GROUPS>
cudaError_t launch_variant(const Int4StreamParams& params, cudaStream_t stream) {
  using Shape = Int4Shape<SLIPSTREAM_INPUT, COLUMNS, GROUPS>;
  const int threads = COLUMNS * 4 < 256 ? COLUMNS * 4 : 256;
  const cudaError_t arranged = launch_kernel(params.is_dependent != 0, dim3(params.in_features / Shape::kDepth), threads, 0,
                                             stream, arrange_kernel<Shape>, params);
  if (arranged != cudaSuccess) return arranged;
  return launch_shape<Shape, int4_stream_kernel<Shape>>(params, params.num_ctas, stream);
}

template <int COLUMNS>
cudaError_t launch_groups(const Int4StreamParams& params, cudaStream_t stream) {
  if (params.groups_per_block == 1) return launch_variant<COLUMNS, 1>(params, stream);
  if (params.groups_per_block == 2) return launch_variant<COLUMNS, 2>(params, stream);
  return cudaErrorInvalidValue;
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_int4_stream(const slipstream::Int4StreamParams* params, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (params->columns) {
    case 16: return slipstream::launch_groups<16>(*params, cuda_stream);
    case 32: return slipstream::launch_groups<32>(*params, cuda_stream);
    case 48: return slipstream::launch_groups<48>(*params, cuda_stream);
    case 64: return slipstream::launch_groups<64>(*params, cuda_stream);
    default: return cudaErrorInvalidValue;
  }
}
