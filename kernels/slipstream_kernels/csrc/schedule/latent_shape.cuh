// Shared memory of the latent attention kernel: 64 rows of queries, two tiles of 64 keys, probabilities, barriers.
// A library built with SLIPSTREAM_ROWS=16, 24 or 32 has as many rows of queries: latent_narrow_shape.cuh.
//
// Rows of the cache are bf16; of a library built with SLIPSTREAM_FP8_ROWS=1 they are FP8 (latent_cache.py), and become
// bf16 where the tensor cores read them (latent_convert.cuh).
#pragma once

#include "mma/hopper_mma.cuh"
#include "ptx/hopper_copy.cuh"
#include "schedule/latent_work.cuh"

#ifndef SLIPSTREAM_FP8_ROWS
#define SLIPSTREAM_FP8_ROWS 0
#endif
#ifndef SLIPSTREAM_ROWS
#define SLIPSTREAM_ROWS 64
#endif

namespace slipstream {

// Sizes are those of DeepSeek's latent: 512 columns that are key and value, 64 rotated ones that are key alone. They lie
// in slabs of 64 columns (128 swizzled bytes) of 64 rows. Two slabs of latents are copied and awaited together.
struct LatentShape {
  static constexpr int kRows = SLIPSTREAM_ROWS;     // (token, head) pairs of a request
  static constexpr int kKeys = 64;
  static constexpr int kValueDim = 512;
  static constexpr int kKeyDim = 576;
  static constexpr int kValueSlabs = kValueDim / 64;
  static constexpr int kSlabs = kKeyDim / 64;       // the last one is rotated
  static constexpr int kPairs = kValueSlabs / 2;    // of slabs of latents
  static constexpr int kSlabBytes = 64 * kSwizzleBytes;
  static constexpr int kTileBytes = kSlabs * kSlabBytes;
  static constexpr bool kIsFp8 = SLIPSTREAM_FP8_ROWS;
  // A warpgroup that loads, two that multiply, one that converts, or two. Together they have the registers that the
  // kernel begins with: 168, 128 or 96 each.
  static constexpr int kConverters = !kIsFp8 ? 0 : kRows == 16 ? 2 : 1;
  static constexpr int kThreads = 384 + 128 * kConverters;
  static constexpr int kLoadRegisters = kIsFp8 && kRows == 64 ? 24 : 40;
  static constexpr int kConvertRegisters = kRows == 64 ? 40 : kRows == 16 ? 64 : 72;
  static constexpr int kRegisters = !kIsFp8 ? 232 : kRows == 64 ? 224 : kRows == 16 ? 152 : 200;
  // An FP8 row: 512 bytes of latents, a scale for each 128 of them, 64 rotated features in bf16.
  static constexpr int kScaleColumns = 128;
  static constexpr int kScales = kValueDim / kScaleColumns;
  static constexpr int kScaleBytes = kKeys * kScales * 4;          // of a tile
  static constexpr int kRopeOffset = kValueDim + kScales * 4;
  static constexpr int kFp8RowBytes = kRopeOffset + 64 * 2;
  static constexpr int kRowBytes = kIsFp8 ? kFp8RowBytes : kKeyDim * 2;   // of the cache
  static constexpr int kRawBytes = kKeys * kValueDim + kScaleBytes;
};

// What a tile's slabs are given back in: the columns of warpgroup 0's outputs, of warpgroup 1's, and the rotated ones.
constexpr int kSlabGroups = 3;

// Where a row of a unit's part lies among the partial sums: the parts follow the first, in one of every two slots of a lane.
__device__ __forceinline__ int64_t part_row(const LatentParams& p, int first_slot, int part, int row) {
  const int slot = first_slot + 2 * p.num_lanes * part - (part == 0 ? 0 : 1);
  return static_cast<int64_t>(slot) * LatentShape::kRows + row;
}

struct LatentMemory {
  using Shape = LatentShape;
  static constexpr int kQueryBytes = Shape::kTileBytes, kQuerySlabBytes = Shape::kSlabBytes;
  // The last slab of queries is held in registers: it arrives where probabilities lie later.
  static constexpr int kProbOffset = Shape::kValueSlabs * Shape::kSlabBytes;
  static constexpr int kTileOffset = kProbOffset + 2 * Shape::kSlabBytes;
  static constexpr int kStateOffset = kTileOffset + 2 * Shape::kTileBytes;
  static constexpr int kSumOffset = kStateOffset + 2 * Shape::kRows * 8;
  static constexpr int kWorkOffset = kSumOffset + 2 * Shape::kRows * 4;
  static constexpr int kFlagOffset = kWorkOffset + 2 * sizeof(LatentWork);
  static constexpr int kBarrierOffset = kFlagOffset + 8;
  static_assert(kBarrierOffset % 8 == 0);
  static constexpr int kFilledBarriers = Shape::kPairs + 1;   // of a tile
  static constexpr int kRawBarrier = 2 + 2 * kFilledBarriers + 2 * kSlabGroups;
  static constexpr int kNumBarriers = kRawBarrier + (Shape::kIsFp8 ? 2 : 0);
  static constexpr int kTotalBytes = kBarrierOffset + 8 * kNumBarriers;
  static_assert(kTotalBytes <= 227 * 1024);

  char* base;         // aligned to the swizzle's units
  uint32_t address;

  __device__ __forceinline__ explicit LatentMemory(char* memory) : base(memory), address(shared_address(memory)) {}

  __device__ __forceinline__ uint32_t queries(int slab) const { return address + slab * Shape::kSlabBytes; }
  __device__ __forceinline__ uint32_t probs(int tile) const { return address + kProbOffset + tile * Shape::kSlabBytes; }
  __device__ __forceinline__ uint32_t keys(int tile, int slab) const {
    return address + kTileOffset + tile * Shape::kTileBytes + slab * Shape::kSlabBytes;
  }
  // FP8 latents of 128 columns as they come: in the upper half of the tile that they become, each where two of its slabs
  // are written last. Their scales, [64 keys][4]: at the end of a slab of the lower half.
  __device__ __forceinline__ uint32_t raw(int tile, int part) const { return keys(tile, Shape::kValueSlabs / 2 + part); }
  __device__ __forceinline__ uint32_t raw_scales(int tile) const {
    return keys(tile, Shape::kValueSlabs / 2) - Shape::kScaleBytes;
  }
  // Maximum and rescaling factor of a row after warpgroup w's tile; a warpgroup's part of the row's normaliser.
  __device__ __forceinline__ uint32_t state(int w, int row) const { return address + kStateOffset + (w * Shape::kRows + row) * 8; }
  __device__ __forceinline__ uint32_t sum(int w, int row) const { return address + kSumOffset + (w * Shape::kRows + row) * 4; }
  // Filled with the queries, and not filled anew before the outputs of the second unit after have begun.
  __device__ __forceinline__ LatentWork& work(int slot) const {
    return reinterpret_cast<LatentWork*>(base + kWorkOffset)[slot];
  }
  __device__ __forceinline__ uint32_t flag() const { return address + kFlagOffset; }   // see LatentJoin
  // Sums of tiles over requests, before the first tile of keys is copied.
  __device__ __forceinline__ int* request_ends() const { return reinterpret_cast<int*>(base + kTileOffset); }
  static constexpr int kMostRequests = 2 * Shape::kTileBytes / 4;

  __device__ __forceinline__ uint32_t barrier(int index) const { return address + kBarrierOffset + 8 * index; }
  __device__ __forceinline__ uint32_t query_filled() const { return barrier(0); }
  __device__ __forceinline__ uint32_t query_emptied() const { return barrier(1); }
  __device__ __forceinline__ uint32_t filled(int tile, int pair) const { return barrier(2 + tile * kFilledBarriers + pair); }
  __device__ __forceinline__ uint32_t rope_filled(int tile) const { return filled(tile, Shape::kPairs); }
  __device__ __forceinline__ uint32_t emptied(int tile, int group) const {
    return barrier(2 + 2 * kFilledBarriers + tile * kSlabGroups + group);
  }
  __device__ __forceinline__ uint32_t raw_filled(int tile) const { return barrier(kRawBarrier + tile); }

  // One thread.
  __device__ __forceinline__ void init() const {
    init_barrier(query_filled(), 1);
    init_barrier(query_emptied(), 8);
    // Slabs of latents are filled by one copy, or by four warps that convert.
    for (int i = 0; i < 2 * kFilledBarriers; ++i) {
      init_barrier(barrier(2 + i), Shape::kIsFp8 && i % kFilledBarriers < Shape::kPairs ? 4 : 1);
    }
    for (int i = kRawBarrier; i < kNumBarriers; ++i) init_barrier(barrier(i), 1);
    for (int i = 0; i < 2 * kSlabGroups; ++i) init_barrier(barrier(2 + 2 * kFilledBarriers + i), 4);
    publish_barriers();
  }
};

}  // namespace slipstream
