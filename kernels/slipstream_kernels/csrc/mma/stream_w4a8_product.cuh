// What a CTA of the streaming W4A8 product does: two threads bring its chunks, consumers multiply them.
#pragma once

#include "epilogue/stream_epilogue.cuh"
#include "mma/stream_w4a8_multiply.cuh"
#include "pipeline/stream_w4a8_load.cuh"

namespace slipstream {

template <typename SHAPE>
__device__ __forceinline__ void consume_stream_w4a8(const StreamW4A8Params& p, const StreamW4A8Memory<SHAPE>& memory,
                                                    const StreamInt4Work<SHAPE>& work, int warpgroup) {
  StreamW4A8Consumer<SHAPE> consumer{memory, warpgroup};
  StreamEpilogue<SHAPE, StreamW4A8Memory<SHAPE>, StreamInt4Work<SHAPE>> epilogue{p, memory, work, warpgroup};
  await_previous();
  epilogue.load_token_scales();
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
__device__ __forceinline__ void multiply_stream_w4a8(const StreamW4A8Params& p, const StreamW4A8Maps& maps, char* shared) {
  start_dependents();
  const StreamW4A8Memory<SHAPE> memory(shared_address(shared));
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  // One value for the whole warp, so that the branch below is seen to be uniform.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp >= SHAPE::kConsumerThreads / 32) {
    lower_registers<SHAPE::kProducerRegisters>();
    const StreamW4A8Producer<SHAPE> producer{p, maps, memory, StreamInt4Work<SHAPE>(p)};
    const int thread = threadIdx.x - SHAPE::kConsumerThreads;
    if (thread == 0) producer.run_codes();
    if (thread == 32) producer.run_tokens();
  } else {
    raise_registers<SHAPE::kConsumerRegisters>();
    consume_stream_w4a8<SHAPE>(p, memory, StreamInt4Work<SHAPE>(p), warp / 4);
  }
}

}  // namespace slipstream
