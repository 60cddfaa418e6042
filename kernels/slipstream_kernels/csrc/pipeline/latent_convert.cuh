// The warpgroup of latent attention that converts, of a cache with FP8 rows: latents that the copy engine brought become
// bf16, each times the scale of its 128 columns, in the swizzled slabs that the tensor cores read.
//
// Shared memory has no room for both forms of a tile, so a tile is converted in place: 128 columns of 64 keys (8 KiB)
// become two slabs of 8 KiB. The four parts lie in slabs 4 to 7, their scales in slab 3. No thread writes slabs 2 * part
// and 2 * part + 1 before all have read what lies there: parts before this one, the last part itself, the scales.
#pragma once

#include "pipeline/latent_widen.cuh"
#include "schedule/latent_shape.cuh"
#include "schedule/latent_work.cuh"

namespace slipstream {

constexpr int kPartRead = 7;   // named barrier

struct LatentConverter : WidenedPart {
  LatentMemory memory;

  // Follows the threads that load, tile by tile in the order of both.
  __device__ __forceinline__ void run(LatentWalk<Shape::kRows, Shape::kKeys> walk) const {
    uint32_t parities = 0;
    LatentWork work;
#pragma unroll 1
    while (walk.advance(work)) {
#pragma unroll 1
      for (int i = 0; i < work.end - work.begin; ++i) {
        const int tile = i % 2;
        wait_barrier(memory.raw_filled(tile), parities >> tile & 1);
        parities ^= 1u << tile;
        convert(tile);
      }
    }
  }

 private:
  __device__ __forceinline__ void convert(int tile) const {
    const int thread = threadIdx.x % kThreads, first_row = thread / kLanes, column = thread % kLanes;
    char* keys = memory.base + (memory.keys(tile, 0) - memory.address);
    const float4* tile_scales =
        reinterpret_cast<const float4*>(keys + (memory.raw_scales(tile) - memory.keys(tile, 0))) + first_row;
    const char* raw = keys + (memory.raw(tile, 0) - memory.keys(tile, 0)) + first_row * Shape::kScaleColumns + column * 16;
    char* slab = keys + column / 4 * Shape::kSlabBytes + first_row * kSwizzleBytes;
    float4 scales[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) scales[i] = tile_scales[i * kRowStep];
#pragma unroll
    for (int part = 0; part < Shape::kScales; ++part) {
      uint4 words[kRounds];
      const auto read = [&](int i) {
        words[i] = *reinterpret_cast<const uint4*>(raw + part * Shape::kSlabBytes + i * kRowStep * Shape::kScaleColumns);
      };
      // The last part lies where its own second slab does.
      if (part + 1 == Shape::kScales) {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) read(i);
      }
      if (part > 0) sync_threads(kPartRead, kThreads);
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        if (part + 1 < Shape::kScales) read(i);
        const float scale = part == 0 ? scales[i].x : part == 1 ? scales[i].y : part == 2 ? scales[i].z : scales[i].w;
        store_widened(slab + 2 * part * Shape::kSlabBytes + i * kRowStep * kSwizzleBytes, column, first_row % 8, words[i], scale);
      }
      fence_shared_for_engines();
      __syncwarp();
      if (thread % 32 == 0) arrive(memory.filled(tile, part));
    }
  }
};

}  // namespace slipstream
