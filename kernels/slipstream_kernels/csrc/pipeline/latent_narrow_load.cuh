// The keys of few rows of queries (latent_narrow_shape.cuh). bf16 rows: a thread fills the ring of each warpgroup. FP8 rows:
// one thread brings latents and scales, in the order of the tiles, to those who convert them, one the rotated slabs, and the
// scales with these where scores take them.
#pragma once

#include "pipeline/latent_load.cuh"
#include "schedule/latent_narrow_shape.cuh"

namespace slipstream {

struct NarrowLoader : LatentLoader<NarrowMemory> {
  // One thread for each ROLE.
  template <int ROLE>
  __device__ __forceinline__ void load_keys(Walk walk) const {
    if constexpr (!Shape::kIsFp8) load_tiles<ROLE>(walk);
    else if constexpr (ROLE == 0) load_raw(walk);
    else load_rotated(walk);
  }

 private:
  template <int W>
  __device__ __forceinline__ void load_tiles(Walk walk) const {
    PipelineState<NarrowMemory::kRing> place;
    for_tiles<2>(walk, W, [&](int row, int) {
#pragma unroll 1
      for (int step = 0; step < Shape::kSlabs; ++step) {
        const int slab = (step + Shape::kSlabs - 1) % Shape::kSlabs;
        load_slab(W, place.stage, place.parity, &maps.cache, 64 * slab, row);
        place.advance();
      }
    });
  }

  __device__ __forceinline__ void load_slab(int w, int stage, uint32_t parity, const CUtensorMap* map, int column,
                                            int row) const {
    wait_barrier(memory.emptied(w, stage), parity ^ 1);
    arrive_expecting(memory.filled(w, stage), Shape::kSlabBytes);
    copy_box(memory.slab(w, stage), map, memory.filled(w, stage), hint(), column, row);
  }

  __device__ __forceinline__ void load_raw(Walk walk) const {
    PipelineState<NarrowMemory::kRaw> place;
    PipelineState<2> scales;
    for_tiles<1>(walk, 0, [&](int row, int) {
      if constexpr (!NarrowMemory::kFoldsScales) {
        wait_barrier(memory.scales_emptied(scales.stage), scales.parity ^ 1);
        arrive_expecting(memory.scales_filled(scales.stage), Shape::kScaleBytes);
        copy_box(memory.scales(scales.stage), &maps.scales, memory.scales_filled(scales.stage), hint(), 0, row);
        scales.advance();
      }
#pragma unroll 1
      for (int part = 0; part < Shape::kScales; ++part) {
        wait_barrier(memory.raw_emptied(place.stage), place.parity ^ 1);
        arrive_expecting(memory.raw_filled(place.stage), Shape::kSlabBytes);
        copy_box(memory.raw(place.stage), &maps.cache, memory.raw_filled(place.stage), hint(),
                 Shape::kScaleColumns * part, row);
        place.advance();
      }
    });
  }

  __device__ __forceinline__ void load_rotated(Walk walk) const {
    uint32_t parities = 0;   // bit w: of warpgroup w's ring
    for_tiles<1>(walk, 0, [&](int row, int i) {
      const int w = i % 2;
      wait_barrier(memory.emptied(w, 0), parities >> w & 1 ^ 1);
      arrive_expecting(memory.filled(w, 0), Shape::kSlabBytes + (NarrowMemory::kFoldsScales ? Shape::kScaleBytes : 0));
      copy_box(memory.slab(w, 0), &maps.rope, memory.filled(w, 0), hint(), 0, row);
      if (NarrowMemory::kFoldsScales) copy_box(memory.scales(w), &maps.scales, memory.filled(w, 0), hint(), 0, row);
      parities ^= 1u << w;
    });
  }
};

}  // namespace slipstream
