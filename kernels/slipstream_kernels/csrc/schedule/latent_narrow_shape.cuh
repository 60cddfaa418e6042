// Shared memory of latent attention with few rows (16, 24 or 32): queries, a ring of slabs of keys for each warpgroup that
// multiplies, probabilities, FP8 latents as they come, barriers.
#pragma once

#include "mma/hopper_mma.cuh"
#include "ptx/hopper_copy.cuh"
#include "schedule/latent_shape.cuh"

namespace slipstream {

// A slab is 64 keys x 64 columns, as in latent_shape.cuh. A tile's slabs come with the rotated one first, for it is given
// back first. A ring has room for a whole tile and the beginning of the next; beside FP8 rows for a tile alone.
struct NarrowMemory {
  using Shape = LatentShape;
  static constexpr int kRows = Shape::kRows;
  static constexpr int kQuerySlabBytes = kRows * kSwizzleBytes;
  static constexpr int kQueryBytes = Shape::kSlabs * kQuerySlabBytes;
  static constexpr bool kIsFp8 = Shape::kIsFp8;
  static constexpr int kRing = kIsFp8 ? Shape::kSlabs : kRows == 16 ? 12 : 11;   // slabs
  static constexpr int kRaw = !kIsFp8 ? 0 : kRows == 16 ? 6 : 4;                 // 64 keys x 128 columns in FP8
  // What the warpgroups give each other at the end of a unit, some slabs of outputs at a time: in a place of its own, so that
  // the next queries come as soon as the last scores are done, or where the queries were.
  static constexpr bool kLoadsQueriesEarly = kRows < 32;
  static constexpr int kGivenSlabs = kLoadsQueriesEarly ? 2 : Shape::kValueSlabs / 2;
  static constexpr int kProbOffset = kQueryBytes;
  // FP8 rows: whether scores and probabilities take the scales, not what is converted. Then there are four times as many
  // probabilities, which find place where the rotated slab was.
  static constexpr bool kFoldsScales = kIsFp8 && kRows == 16;
  static constexpr int kRingOffset = kProbOffset + (kFoldsScales ? 0 : 2 * kQuerySlabBytes);
  static constexpr int kRawOffset = kRingOffset + 2 * kRing * Shape::kSlabBytes;
  static constexpr int kGivenOffset = kRawOffset + kRaw * Shape::kSlabBytes;
  static constexpr int kScaleOffset = kGivenOffset + (kLoadsQueriesEarly ? kGivenSlabs * kRows * 256 : 0);
  static constexpr int kMaximumOffset = kScaleOffset + (kIsFp8 ? 2 * Shape::kScaleBytes : 0);
  static constexpr int kSumOffset = kMaximumOffset + 2 * kRows * 16;
  static constexpr int kWorkOffset = kSumOffset + 2 * kRows * 16;
  static constexpr int kFlagOffset = kWorkOffset + 2 * sizeof(LatentWork);
  static constexpr int kBarrierOffset = kFlagOffset + 8;
  static_assert(kBarrierOffset % 8 == 0);
  static constexpr int kRawBarrier = 2 + 4 * kRing;
  static constexpr int kNumBarriers = kRawBarrier + 2 * kRaw + (kIsFp8 ? 4 : 0);
  static constexpr int kTotalBytes = kBarrierOffset + 8 * kNumBarriers;
  static_assert(kTotalBytes <= 227 * 1024);
  static_assert(kLoadsQueriesEarly || kGivenSlabs * kRows * 256 <= kQueryBytes);

  char* base;         // aligned to the swizzle's units
  uint32_t address;

  __device__ __forceinline__ explicit NarrowMemory(char* memory) : base(memory), address(shared_address(memory)) {}

  __device__ __forceinline__ uint32_t queries(int slab) const { return address + slab * kQuerySlabBytes; }
  // group: of columns with scales of their own; the rotated slab lies in the first place of the ring.
  __device__ __forceinline__ uint32_t probs(int w, int group) const {
    return kFoldsScales ? slab(w, 0) + group * kQuerySlabBytes : address + kProbOffset + w * kQuerySlabBytes;
  }
  __device__ __forceinline__ uint32_t slab(int w, int stage) const {
    return address + kRingOffset + (w * kRing + stage) * Shape::kSlabBytes;
  }
  __device__ __forceinline__ uint32_t raw(int stage) const { return address + kRawOffset + stage * Shape::kSlabBytes; }
  __device__ __forceinline__ uint32_t given() const { return address + (kLoadsQueriesEarly ? kGivenOffset : 0); }
  // Of a tile: [64 keys][4]. Folded ones are filled and given back with the rotated slab of warpgroup `stage`.
  __device__ __forceinline__ uint32_t scales(int stage) const { return address + kScaleOffset + stage * Shape::kScaleBytes; }
  // Of warpgroup w's four warps, side by side: maxima of a row's scores, sums of its probabilities.
  __device__ __forceinline__ uint32_t maxima(int w, int row) const { return address + kMaximumOffset + (w * kRows + row) * 16; }
  __device__ __forceinline__ uint32_t sums(int w, int row) const { return address + kSumOffset + (w * kRows + row) * 16; }
  // As in LatentMemory.
  __device__ __forceinline__ LatentWork& work(int slot) const {
    return reinterpret_cast<LatentWork*>(base + kWorkOffset)[slot];
  }
  __device__ __forceinline__ uint32_t flag() const { return address + kFlagOffset; }
  __device__ __forceinline__ int* request_ends() const { return reinterpret_cast<int*>(base + kRingOffset); }
  static constexpr int kMostRequests = 2 * Shape::kTileBytes / 4;
  static_assert(4 * kMostRequests <= (2 * kRing + kRaw) * Shape::kSlabBytes);

  __device__ __forceinline__ uint32_t barrier(int index) const { return address + kBarrierOffset + 8 * index; }
  __device__ __forceinline__ uint32_t query_filled() const { return barrier(0); }
  __device__ __forceinline__ uint32_t query_emptied() const { return barrier(1); }
  __device__ __forceinline__ uint32_t filled(int w, int stage) const { return barrier(2 + w * kRing + stage); }
  __device__ __forceinline__ uint32_t emptied(int w, int stage) const { return barrier(2 + (2 + w) * kRing + stage); }
  __device__ __forceinline__ uint32_t raw_filled(int stage) const { return barrier(kRawBarrier + stage); }
  __device__ __forceinline__ uint32_t raw_emptied(int stage) const { return barrier(kRawBarrier + kRaw + stage); }
  __device__ __forceinline__ uint32_t scales_filled(int stage) const { return barrier(kRawBarrier + 2 * kRaw + stage); }
  __device__ __forceinline__ uint32_t scales_emptied(int stage) const { return barrier(kRawBarrier + 2 * kRaw + 2 + stage); }

  // One thread.
  __device__ __forceinline__ void init() const {
    init_barrier(query_filled(), 1);
    init_barrier(query_emptied(), 8);
    // Slabs are filled by one copy, or by the four warps that convert; all are given back by four warps.
    for (int w = 0; w < 2; ++w) {
      for (int stage = 0; stage < kRing; ++stage) {
        init_barrier(filled(w, stage), kIsFp8 && stage > 0 ? 4 : 1);
        init_barrier(emptied(w, stage), 4);
      }
    }
    for (int stage = 0; stage < kRaw; ++stage) init_barrier(raw_filled(stage), 1), init_barrier(raw_emptied(stage), 4);
    for (int stage = 0; kIsFp8 && stage < 2; ++stage) {
      init_barrier(scales_filled(stage), 1), init_barrier(scales_emptied(stage), 4 * Shape::kConverters);
    }
    publish_barriers();
  }
};

}  // namespace slipstream
