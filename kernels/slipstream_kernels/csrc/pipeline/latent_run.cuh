// What a CTA of latent attention does, by the roles of its warps.
#pragma once

#if SLIPSTREAM_ROWS < 64
#include "mma/latent_narrow_consumer.cuh"
#include "pipeline/latent_narrow_convert.cuh"
#include "pipeline/latent_narrow_load.cuh"
#else
#include "mma/latent_consumer.cuh"
#include "pipeline/latent_convert.cuh"
#include "pipeline/latent_load.cuh"
#endif

namespace slipstream {

#if SLIPSTREAM_ROWS < 64
using LatentMemoryOf = NarrowMemory;
using LatentLoaderOf = NarrowLoader;
template <int W>
using LatentMultiplier = NarrowConsumer<W>;
template <int C>
using LatentWidener = NarrowConverter<C>;
#else
using LatentMemoryOf = LatentMemory;
using LatentLoaderOf = WideLoader;
template <int W>
using LatentMultiplier = LatentConsumer<W>;
template <int C>
using LatentWidener = LatentConverter;
#endif

__device__ __forceinline__ void run_latent_attention(const LatentParams& p, const LatentMaps& maps,
                                                     const LatentMemoryOf& memory) {
  using Shape = LatentShape;
  if (threadIdx.x == 0) memory.init();
  const auto walk = begin_walk<Shape::kThreads, Shape::kRows, Shape::kKeys>(p, memory.request_ends(),
                                                                            reinterpret_cast<int*>(memory.base));
  fence_shared_for_engines();
  __syncthreads();   // the copy engine brings tiles of keys where the sums are
  // One value for the whole warp, so that the branches below are seen to be uniform.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    lower_registers<Shape::kLoadRegisters>();
    const LatentLoaderOf loader{p, maps, memory};
    if (threadIdx.x == 0) loader.load_keys<0>(walk);
    if (threadIdx.x == 32) loader.load_keys<1>(walk);
    if (threadIdx.x == 64) loader.load_queries(walk);
    if (threadIdx.x >= 96) loader.leave_plan(walk);
  } else if (warpgroup >= 3) {
    lower_registers<Shape::kConvertRegisters>();
    if constexpr (Shape::kConverters > 0) {
      if (warpgroup == 3) LatentWidener<0>{{}, memory}.run(walk);
      else if constexpr (Shape::kConverters > 1) LatentWidener<1>{{}, memory}.run(walk);
    }
  } else {
    raise_registers<Shape::kRegisters>();
    await_previous();
    if (warpgroup == 1) LatentMultiplier<0>{p, memory}.run();
    else LatentMultiplier<1>{p, memory}.run();
  }
}

}  // namespace slipstream
