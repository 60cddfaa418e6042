// What a CTA of the prefill kernel does: it has one loading warp (prefill_load.cuh), for a quantised cache a warpgroup that
// converts what was loaded, and those that multiply.
#pragma once

#include "mma/prefill_consumer.cuh"
#include "mma/prefill_fp8_consumer.cuh"
#include "pipeline/prefill_convert.cuh"
#include "pipeline/prefill_load.cuh"

namespace slipstream {

template <typename SHAPE>
__device__ __forceinline__ void run_prefill_attention(const typename SHAPE::Params& p, const typename SHAPE::Maps& maps,
                                                      char* shared) {
  const PrefillMemory<SHAPE> memory(shared);
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  // One value for the whole warp, so that the branch below is seen to be uniform.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    lower_registers<SHAPE::kLoadRegisters>();
    if (threadIdx.x / 32 == 0) PrefillLoader<SHAPE>{p, maps, memory}.run();
  } else if (warpgroup < SHAPE::kFirstMultiplier) {
    if constexpr (SHAPE::kIsConverted) {
      lower_registers<SHAPE::kConvertRegisters>();
      PrefillConverter<SHAPE>{memory}.run();
    }
  } else {
    raise_registers<SHAPE::kRegisters>();
    using Consumer = std::conditional_t<SHAPE::kHasFp8Values, PrefillFp8Consumer<SHAPE>, PrefillConsumer<SHAPE>>;
    Consumer{{p, memory, warpgroup - SHAPE::kFirstMultiplier}}.run();
  }
}

}  // namespace slipstream
