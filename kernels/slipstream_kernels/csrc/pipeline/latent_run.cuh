// What a CTA of latent attention does, by the roles of its warps.
#pragma once

#include "mma/latent_consumer.cuh"
#include "pipeline/latent_convert.cuh"
#include "pipeline/latent_load.cuh"

namespace slipstream {

__device__ __forceinline__ void run_latent_attention(const LatentParams& p, const LatentMaps& maps,
                                                     const LatentMemory& memory) {
  using Shape = LatentShape;
  const LatentLine<Shape::kRows, Shape::kKeys> line{p};
  if (threadIdx.x == 0) memory.init();
  int* ends = memory.request_ends();
  sum_over_requests<Shape::kThreads>(p.num_requests, ends, reinterpret_cast<int*>(memory.base),
                                     [&line](int request) { return line.cost(request); });
  const LatentWalk<Shape::kRows, Shape::kKeys> walk(p, ends, blockIdx.x);
  fence_shared_for_engines();
  __syncthreads();   // the copy engine brings tiles of keys where the sums are
  // One value for the whole warp, so that the branches below are seen to be uniform.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    lower_registers<Shape::kLoadRegisters>();
    const LatentLoader loader{p, maps, memory};
    if (threadIdx.x == 0) loader.load_keys<0>(walk);
    if (threadIdx.x == 32) loader.load_keys<1>(walk);
    if (threadIdx.x == 64) loader.load_queries(walk);
    if (threadIdx.x >= 96) loader.leave_plan(walk);
  } else if (Shape::kIsFp8 && warpgroup == 3) {
    lower_registers<Shape::kConvertRegisters>();
    LatentConverter{memory}.run(walk);
  } else {
    raise_registers<Shape::kRegisters>();
    await_previous();
    if (warpgroup == 1) LatentConsumer<0>{p, memory}.run();
    else LatentConsumer<1>{p, memory}.run();
  }
}

}  // namespace slipstream
