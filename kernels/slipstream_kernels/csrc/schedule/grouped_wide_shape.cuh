// Sizes of one variant of the grouped GEMM with 4-bit weights whose products are a warpgroup's, and where things lie in
// shared memory. What depends on the weights: formats/grouped_wide_formats.cuh.
#pragma once

#include <cstdint>

namespace slipstream {

// A CTA: a tile of an expert's rows by 128 output features, 64 of each of two consumer warpgroups. A last warp asks for
// rows of x and weights, STAGE_UNITS units of 64 input features at a time. An SM has registers for CTAS of them.
template <typename FORMAT, int TILE_ROWS, int STAGE_UNITS, int STAGES, int CTAS>
struct GroupedWideShape {
  using Format = FORMAT;
  using Operand = typename FORMAT::Operand;
  static constexpr int kInputs = 64;   // of a unit
  static constexpr int kTileRows = TILE_ROWS, kSums = TILE_ROWS / 2;   // of a thread
  static constexpr int kConsumers = 256, kThreads = kConsumers + 32, kCtas = CTAS;
  static constexpr int kFeatures = 128;

  static constexpr int kStageUnits = STAGE_UNITS, kStages = STAGES;
  static constexpr int kSlabBytes = 2 * kInputs * TILE_ROWS;   // rows of x, of a unit: 128 bytes each, swizzled
  static constexpr int kRowBytes = STAGE_UNITS * kSlabBytes;   // of a stage
  static constexpr int kWeightBytes = FORMAT::template stage_bytes<STAGE_UNITS>();

  static constexpr int kSumStride = 2 * (kFeatures + 8);   // bytes of a row of results in shared memory
  static constexpr int kWeightOffset = STAGES * kRowBytes;
  static constexpr int kBarrierOffset = kWeightOffset + STAGES * kWeightBytes;
  static constexpr int kTotalBytes = kBarrierOffset + 16 * STAGES;
  static_assert(TILE_ROWS % 8 == 0 && kWeightBytes % 16 == 0 && TILE_ROWS * kSumStride <= kBarrierOffset);
};

// Addresses in the shared memory of a CTA, which begins at a multiple of 1,024.
template <typename SHAPE>
struct GroupedWideMemory {
  uint32_t base;

  __device__ __forceinline__ uint32_t rows(int stage) const { return base + stage * SHAPE::kRowBytes; }
  __device__ __forceinline__ uint32_t weights(int stage) const {
    return base + SHAPE::kWeightOffset + stage * SHAPE::kWeightBytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return base + SHAPE::kBarrierOffset + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(SHAPE::kStages + stage); }
};

}  // namespace slipstream
