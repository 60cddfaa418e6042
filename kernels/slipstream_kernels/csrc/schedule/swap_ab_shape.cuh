// Sizes of one variant of the swap-AB GEMM, the work of a CTA in its cluster, and where things lie in shared memory.
//
// A unit is 16 weight rows: neighbours, or 8 rows of gate and the same 8 of up. A pass of a CTA multiplies up to kRows
// weight rows with all tokens, over its split of the summed dimension.
#pragma once

#include <cuda_fp8.h>

#include "ptx/cluster.cuh"
#include "params/swap_ab_params.h"
#include "ptx/hopper_copy.cuh"
#include "schedule/work_range.cuh"

namespace slipstream {

// Weight formats. Product: the type that tensor cores multiply.
template <typename T>
struct PlainTiles {
  using Output = T;
  using Product = T;
  static constexpr bool kIsScaled = false, kIsByBlocks = false;
};

// e4m3, one scale per weight row and per token.
template <typename T>
struct ChannelTiles {
  using Output = T;
  using Product = __nv_fp8_e4m3;
  static constexpr bool kIsScaled = true, kIsByBlocks = false;
};

// e4m3, one scale per 128 x 128 weights, and per token and 128 columns.
template <typename T>
struct BlockTiles : ChannelTiles<T> {
  static constexpr bool kIsByBlocks = true;
};

// Less than all: small kernels that start early run beside this one, and the next GEMM's CTAs start as these end.
constexpr int kMaxSharedBytes = 200 * 1024;

template <typename FORMAT, int COLUMNS, int TILES, int SPLITS, bool IS_GATED>
struct SwapAbShape {
  using Format = FORMAT;
  using Output = typename FORMAT::Output;
  using Product = typename FORMAT::Product;
  static constexpr bool kIsGated = IS_GATED;
  static constexpr bool kIsFp8 = sizeof(Product) == 1;
  static constexpr int kColumns = COLUMNS, kTiles = TILES, kSplits = SPLITS;
  static constexpr int kWarpgroups = 2, kConsumerThreads = 128 * kWarpgroups, kProducerWarps = 4;
  static constexpr int kThreads = 128 + kConsumerThreads;
  static constexpr int kRows = 64 * TILES * kWarpgroups, kUnits = kRows / 16;
  static constexpr int kChunk = 128 / sizeof(Product);   // of the summed dimension, 128 bytes
  static constexpr int kSteps = 4;                       // products of 32 bytes
  // A tile of sums consists of blocks as wide as one instruction. Products that add to the same sums wait for each other,
  // some 80 clocks for any size: small blocks alternate between several sets of sums.
  static constexpr int kBlockColumns = COLUMNS < 128 ? COLUMNS : 128, kHalves = COLUMNS / kBlockColumns;
  static constexpr int kBlockSums = kBlockColumns / 2, kBlockGroups = kBlockColumns / 8;
  static constexpr int kBlocks = TILES * kHalves, kSums = kBlocks * kBlockSums;
  static constexpr int at_most(int wanted, int limit) { return wanted < limit ? wanted : limit < 1 ? 1 : limit; }
  static constexpr int kSets = kIsFp8 ? 1 : at_most(kSteps / kBlocks, 128 / kSums);
  // e4m3: blocks whose partial sums of one chunk are held beside the promoted sums, and sets of these.
  static constexpr int kPartialBlocks = kSums <= 64 ? kBlocks : 1;
  static constexpr int kPartialSets = at_most(kSteps / kPartialBlocks, (192 - kSums) / (kPartialBlocks * kBlockSums));
  static constexpr int kGroups = COLUMNS / 8, kOwnGroups = kGroups / SPLITS;   // of 8 tokens: all, those a CTA finishes
  static_assert(kOwnGroups * SPLITS == kGroups);

  static constexpr int kUnitBytes = 16 * 128, kTokenBytes = COLUMNS * 128;
  static constexpr int kStageScaleBytes = FORMAT::kIsByBlocks ? 1024 : 0;   // COLUMNS floats
  static constexpr int kExchangeBytes = (SPLITS - 1) * TILES * kOwnGroups * kConsumerThreads * 16;
  static constexpr int kScaleBytes = COLUMNS * 4;
  static constexpr int kMaxStages = 16;
  // In this order; the base is aligned by hand. A stage holds the units of the largest pass; products of the tiles beyond
  // them read what follows, and their sums are not written.
  static constexpr int kScaleOffset = kExchangeBytes;
  static constexpr int kBarrierOffset = kScaleOffset + kScaleBytes;
  static constexpr int kRingOffset = (kBarrierOffset + 8 * (2 * kMaxStages + 1) + 1023) / 1024 * 1024;
  static constexpr int kRingBytes = kMaxSharedBytes - 1024 - kRingOffset;
  static constexpr int kTotalBytes = kMaxSharedBytes;

  static __host__ __device__ constexpr int stage_bytes(int units) {
    return units * kUnitBytes + kTokenBytes + kStageScaleBytes;
  }
  // Bytes that such products read beyond the last stage.
  static __host__ __device__ constexpr int overrun_bytes(int units) {
    const int beyond = (kUnits - units) * kUnitBytes - kTokenBytes - kStageScaleBytes;
    return beyond > 0 ? beyond : 0;
  }
  static __host__ __device__ constexpr int stages(int units) {
    const int stages = (kRingBytes - overrun_bytes(units)) / stage_bytes(units);
    return stages < kMaxStages ? stages : kMaxStages;
  }
  static_assert(stages(kUnits) >= 1);
};

// Two boxes over the weight's units: of 4 and of 1.
struct SwapAbMaps {
  CUtensorMap weights;
  CUtensorMap unit;
  CUtensorMap tokens;
};

// The work of this CTA.
template <typename SHAPE>
struct SwapAbWork {
  int rank;                       // in the cluster: the split of the summed dimension
  int begin_unit, end_unit;
  int begin_chunk, end_chunk;
  int num_passes;
  int max_units;                  // of a pass, of any CTA

  __device__ __forceinline__ explicit SwapAbWork(const SwapAbParams& p) {
    const int cluster = blockIdx.x / SHAPE::kSplits, num_clusters = gridDim.x / SHAPE::kSplits;
    rank = blockIdx.x % SHAPE::kSplits;
    begin_unit = split_begin(p.num_units, cluster, num_clusters);
    end_unit = split_begin(p.num_units, cluster + 1, num_clusters);
    const int num_chunks = (p.in_features + SHAPE::kChunk - 1) / SHAPE::kChunk;
    begin_chunk = split_begin(num_chunks, rank, SHAPE::kSplits);
    end_chunk = split_begin(num_chunks, rank + 1, SHAPE::kSplits);
    const int most = (p.num_units + num_clusters - 1) / num_clusters;
    num_passes = (most + SHAPE::kUnits - 1) / SHAPE::kUnits;
    max_units = (most + num_passes - 1) / num_passes;
  }

  // Has divisions, 0.1 us for one thread: call it once a pass, not once a chunk.
  __device__ __forceinline__ WorkRange units_of(int pass) const {
    const int count = end_unit - begin_unit;
    return {begin_unit + split_begin(count, pass, num_passes), begin_unit + split_begin(count, pass + 1, num_passes)};
  }

 private:
  static __device__ __forceinline__ int split_begin(uint32_t total, uint32_t index, uint32_t count) {
    return static_cast<int>(total * index / count);
  }
};

// The unit of a pass that this warp has in a tile.
template <typename SHAPE>
__device__ __forceinline__ int unit_in_pass(int tile, int warpgroup) {
  return (tile * SHAPE::kWarpgroups + warpgroup) * 4 + threadIdx.x % 128 / 32;
}

// The weight row of this thread in the lower or upper half of a unit.
template <typename SHAPE>
__device__ __forceinline__ int weight_row(const SwapAbParams& p, int unit, int half) {
  const int row = threadIdx.x % 32 / 4;
  if constexpr (SHAPE::kIsGated) return 8 * unit + row + half * 8 * p.num_units;
  return 16 * unit + 8 * half + row;
}

template <typename SHAPE>
struct SwapAbMemory {
  uint32_t base;
  int token_offset, stage_bytes, num_stages;

  __device__ __forceinline__ SwapAbMemory(uint32_t start, int units)
      : base((start + 1023) & ~1023u), token_offset(units * SHAPE::kUnitBytes),
        stage_bytes(SHAPE::stage_bytes(units)), num_stages(SHAPE::stages(units)) {}

  __device__ __forceinline__ uint32_t exchange() const { return base; }
  __device__ __forceinline__ uint32_t token_scales() const { return base + SHAPE::kScaleOffset; }
  __device__ __forceinline__ uint32_t full(int stage) const { return base + SHAPE::kBarrierOffset + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(SHAPE::kMaxStages + stage); }
  __device__ __forceinline__ uint32_t received() const { return full(2 * SHAPE::kMaxStages); }
  __device__ __forceinline__ uint32_t weights(int stage) const {
    return base + SHAPE::kRingOffset + stage * stage_bytes;
  }
  __device__ __forceinline__ uint32_t tokens(int stage) const { return weights(stage) + token_offset; }
  __device__ __forceinline__ uint32_t stage_scales(int stage) const { return tokens(stage) + SHAPE::kTokenBytes; }

  // By one thread.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < num_stages; ++stage) {
      init_barrier(full(stage), SHAPE::kProducerWarps);
      init_barrier(empty(stage), SHAPE::kConsumerThreads / 32);
    }
    init_barrier(received(), 1);
    publish_barriers();
  }
};

}  // namespace slipstream
