// The warpgroups that convert FP8 latents for few rows of queries: of two each takes every second part of a tile. A part, 128
// columns of 64 keys, goes from where the copy engine left it to two slabs in the ring of the warpgroup that multiplies the
// tile. With 16 rows its bits are laid out as bf16 and no more: scales are folded into scores and probabilities
// (latent_narrow_consumer.cuh).
#pragma once

#include "pipeline/latent_widen.cuh"
#include "schedule/latent_narrow_shape.cuh"

namespace slipstream {

template <int C>
struct NarrowConverter : WidenedPart {
  const NarrowMemory& memory;

  // Follows the threads that load, tile by tile.
  __device__ __forceinline__ void run(LatentWalk<Shape::kRows, Shape::kKeys> walk) const {
    PipelineState<2> scales;
    PipelineState<NarrowMemory::kRaw> place;
    if (C > 0) place.advance();
    uint32_t parities = 0;   // bit w: of warpgroup w's ring
    LatentWork work;
#pragma unroll 1
    while (walk.advance(work)) {
#pragma unroll 1
      for (int i = 0; i < work.end - work.begin; ++i) {
        const int w = i % 2;
        if (!NarrowMemory::kFoldsScales) wait_barrier(memory.scales_filled(scales.stage), scales.parity);
#pragma unroll
        for (int part = C; part < Shape::kScales; part += Shape::kConverters) {
          convert(part, place.stage, place.parity, memory.scales(scales.stage), w, parities >> w & 1);
#pragma unroll
          for (int step = 0; step < Shape::kConverters; ++step) place.advance();
        }
        __syncwarp();
        if (!NarrowMemory::kFoldsScales && threadIdx.x % 32 == 0) arrive(memory.scales_emptied(scales.stage));
        scales.advance();
        parities ^= 1u << w;
      }
    }
  }

 private:
  __device__ __forceinline__ char* at(uint32_t address) const { return memory.base + (address - memory.address); }

  __device__ __forceinline__ void convert(int part, int stage, uint32_t parity, uint32_t tile_scales, int w,
                                          uint32_t ring_parity) const {
    const int thread = threadIdx.x % kThreads, first_row = thread / kLanes, column = thread % kLanes;
    wait_barrier(memory.raw_filled(stage), parity);
    uint4 words[kRounds];
    float scales[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int row = first_row + i * kRowStep;
      words[i] = load_shared_16(memory.raw(stage) + row * Shape::kScaleColumns + column * 16);
      if constexpr (!NarrowMemory::kFoldsScales) {
        scales[i] = __uint_as_float(load_shared_4(tile_scales + (row * Shape::kScales + part) * 4));
      }
    }
    fence_shared_for_engines();   // else the copy engine may overwrite what is still on its way here
    __syncwarp();
    if (thread % 32 == 0) arrive(memory.raw_emptied(stage));
    const int first_slab = 1 + 2 * part;   // the rotated one comes first
    wait_barrier(memory.emptied(w, first_slab), ring_parity ^ 1);
    wait_barrier(memory.emptied(w, first_slab + 1), ring_parity ^ 1);
    char* slab = at(memory.slab(w, first_slab)) + column / 4 * Shape::kSlabBytes + first_row * kSwizzleBytes;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      char* to = slab + i * kRowStep * kSwizzleBytes;
      if constexpr (NarrowMemory::kFoldsScales) {
        store_columns(to, column, first_row % 8, lay_out_latents(words[i].x, words[i].y),
                      lay_out_latents(words[i].z, words[i].w));
      } else {
        store_widened(to, column, first_row % 8, words[i], scales[i]);
      }
    }
    fence_shared_for_engines();
    __syncwarp();
    if (thread % 32 == 0) {
      arrive(memory.filled(w, first_slab));
      arrive(memory.filled(w, first_slab + 1));
    }
  }
};

}  // namespace slipstream
