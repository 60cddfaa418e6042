// Sizes of one variant of the streaming grouped GEMM, the tiles of a CTA, and where things lie in shared memory.
//
// A tile is 128 weight rows of an expert by up to COLUMNS of its rows of x; gated, 64 rows of gate and the 64 of up that they
// are multiplied with, eight by eight. An expert's tiles follow each other, those of the same weights directly. CTA i begins with
// tile i; whoever has asked for the weights of a tile takes the next one that is left, so that a CTA that comes late, or whose
// memory is slow, does fewer. Two warpgroups of consumers take a CTA's tiles in turns: one writes while the other multiplies.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "params/grouped_stream_params.h"
#include "ptx/cluster.cuh"
#include "ptx/hopper_copy.cuh"
#include "ptx/memory_access.cuh"
#include "ptx/warp_scan.cuh"

namespace slipstream {

// Weights and rows: bf16; e4m3 with a scale of each output feature and row; e4m3 with scales of 128 x 128 weights, and of 128
// columns of a row.
enum class GroupedScales { kNone, kOfRows, kOfBlocks };

template <bool FIRST, typename A, typename B>
struct Either {
  using Type = A;
};
template <typename A, typename B>
struct Either<false, A, B> {
  using Type = B;
};

template <GroupedScales SCALES, int COLUMNS, bool GATED>
struct GroupedStreamShape {
  static constexpr bool kHasRowScales = SCALES == GroupedScales::kOfRows, kHasBlockScales = SCALES == GroupedScales::kOfBlocks;
  static constexpr bool kIsFp8 = SCALES != GroupedScales::kNone;
  using Operand = typename Either<kIsFp8, __nv_fp8_e4m3, __nv_bfloat16>::Type;
  static constexpr bool kGated = GATED;
  static constexpr int kColumns = COLUMNS;
  static constexpr int kWarpgroups = 2, kConsumers = 128 * kWarpgroups, kThreads = kConsumers + 128;
  static constexpr int kRowWarps = COLUMNS >= 64 ? 2 : 1;
  static constexpr int kChunk = 128 / sizeof(Operand), kSteps = 4;   // input features of a stage; products of 32 bytes
  static constexpr int kHalves = 2, kSums = COLUMNS / 2;             // products of 64 weight rows; sums of a thread
  static constexpr int kFeatures = GATED ? 64 : 128;                 // of a tile's results

  static constexpr int kWeightBytes = 128 * 128, kRowBytes = COLUMNS * 128, kStageBytes = kWeightBytes + kRowBytes;
  static constexpr int kMaxStages = 12, kMaxExperts = 512;
  static constexpr int kSlots = 4;   // tiles that the warp of weights may be ahead
  static constexpr int kSlotOffset = 3 * 8 * kMaxStages, kReadyOffset = kSlotOffset + 2 * 8 * kSlots;
  static constexpr int kFlipOffset = kReadyOffset + 8, kDoneOffset = kReadyOffset + 16;
  static constexpr int kTileOffset = kDoneOffset + 8 * kWarpgroups;
  static constexpr int kBeginOffset = 512;                                  // of experts: first rows
  static constexpr int kEndOffset = kBeginOffset + 4 * (kMaxExperts + 4);   // tiles of rows until their last
  // Scales of rows: for each consumer warpgroup; of blocks: for each stage.
  static constexpr int kScaleOffset = kEndOffset + 4 * kMaxExperts, kScaleBytes = 4 * COLUMNS;
  static constexpr int kScaleSets = kHasBlockScales ? kMaxStages : kWarpgroups;
  static constexpr int kRingOffset = (kScaleOffset + kScaleSets * kScaleBytes + 1023) / 1024 * 1024;
  static constexpr int kTotalBytes = 226 * 1024;
  static constexpr int kFitting = (kTotalBytes - 1024 - kRingOffset) / kStageBytes;
  static constexpr int kStages = kFitting < kMaxStages ? kFitting : kMaxStages;
  static_assert(kTileOffset + 16 * kSlots <= kBeginOffset && kStages >= 4 && kSlots % kWarpgroups == 0);
};

// Rows of x that an expert has of one tile; no rows: there are no more tiles.
struct GroupedTile {
  int expert, feature_tile, first_row, num_rows;
};

// Barriers, and who arrives and who waits:
// weights_full: the warp of weights announces bytes; copies complete them. Consumers wait.
// rows_full: each lane of the warps of rows, when its copies have ended. Consumers wait.
// empty: a lane of each warp of the tile's consumers arrives; both kinds of producers wait.
// ready: the warp that lists the tiles arrives once; the warp of weights waits.
// tile_full: the warp of weights arrives when it has written the CTA's next tile, and before the first one whether its
// guess was wrong. tile_empty: a lane of each warp that reads it.
// done: of each consumer warpgroup, a lane of each warp when it has multiplied a tile. The other one waits before it begins the
// next: it would take an earlier round of a stage for its own.
template <typename SHAPE>
struct GroupedStreamMemory {
  uint32_t base;

  __device__ __forceinline__ uint32_t weights_full(int stage) const { return base + 8 * stage; }
  __device__ __forceinline__ uint32_t rows_full(int stage) const { return base + 8 * (SHAPE::kMaxStages + stage); }
  __device__ __forceinline__ uint32_t empty(int stage) const { return base + 8 * (2 * SHAPE::kMaxStages + stage); }
  __device__ __forceinline__ uint32_t tile_full(int slot) const { return base + SHAPE::kSlotOffset + 8 * slot; }
  __device__ __forceinline__ uint32_t tile_empty(int slot) const { return tile_full(SHAPE::kSlots + slot); }
  __device__ __forceinline__ uint32_t tile(int slot) const { return base + SHAPE::kTileOffset + 16 * slot; }
  __device__ __forceinline__ uint32_t ready() const { return base + SHAPE::kReadyOffset; }
  __device__ __forceinline__ uint32_t done(int warpgroup) const { return base + SHAPE::kDoneOffset + 8 * warpgroup; }
  __device__ __forceinline__ uint32_t flip() const { return base + SHAPE::kFlipOffset; }
  __device__ __forceinline__ uint32_t begin(int expert) const { return base + SHAPE::kBeginOffset + 4 * expert; }
  __device__ __forceinline__ uint32_t end(int expert) const { return base + SHAPE::kEndOffset + 4 * expert; }
  // set: a consumer warpgroup, or a stage.
  __device__ __forceinline__ uint32_t row_scales(int set) const { return base + SHAPE::kScaleOffset + set * SHAPE::kScaleBytes; }
  __device__ __forceinline__ uint32_t weights(int stage) const { return base + SHAPE::kRingOffset + stage * SHAPE::kStageBytes; }
  __device__ __forceinline__ uint32_t rows(int stage) const { return weights(stage) + SHAPE::kWeightBytes; }

  // By one thread.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < SHAPE::kStages; ++stage) {
      init_barrier(weights_full(stage), 1);
      init_barrier(rows_full(stage), 32 * SHAPE::kRowWarps);
      init_barrier(empty(stage), 4);
    }
    for (int slot = 0; slot < SHAPE::kSlots; ++slot) {
      init_barrier(tile_full(slot), 1);
      init_barrier(tile_empty(slot), 4 + SHAPE::kRowWarps);
    }
    for (int warpgroup = 0; warpgroup < SHAPE::kWarpgroups; ++warpgroup) init_barrier(done(warpgroup), 4);
    init_barrier(ready(), 1);
    publish_barriers();
  }
};

__host__ __device__ __forceinline__ int count_feature_tiles(const GroupedStreamParams& p, int features) {
  return ((p.is_gated ? p.out_features / 2 : p.out_features) + features - 1) / features;
}

// Calls visit(expert, first row, last row + 1, tiles of rows before it, tiles until its last) for all experts, a lane for each;
// by one warp. The last experts may be beyond num_experts; those have no tiles.
template <typename SHAPE, typename VISIT>
__device__ __forceinline__ void visit_experts(const GroupedStreamParams& p, VISIT visit) {
  constexpr int kAtOnce = 4;   // loads of a lane under way
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int first = 0; first < p.num_experts; first += 32 * kAtOnce) {
    int begin[kAtOnce], end[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int expert = min(first + 32 * i + lane, p.num_experts - 1);
      begin[i] = __ldcg(p.offsets + expert), end[i] = __ldcg(p.offsets + expert + 1);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int expert = first + 32 * i + lane;
      const int tiles = expert < p.num_experts ? (end[i] - begin[i] + SHAPE::kColumns - 1) / SHAPE::kColumns : 0;
      const int until = before + inclusive_sum(tiles);
      visit(expert, begin[i], end[i], until - tiles, until);
      before = __shfl_sync(~0u, until, 31);
    }
  }
}

// By one warp, when the kernel before has ended: writes the experts' first rows, and the tiles of rows of the experts 0..e.
template <typename SHAPE>
__device__ __forceinline__ void list_tiles(const GroupedStreamParams& p, const GroupedStreamMemory<SHAPE>& memory) {
  visit_experts<SHAPE>(p, [&](int expert, int begin, int end, int, int until) {
    if (expert >= p.num_experts) return;
    store_shared_4(memory.begin(expert), static_cast<uint32_t>(begin));
    store_shared_4(memory.end(expert), static_cast<uint32_t>(until));
    if (expert == p.num_experts - 1) store_shared_4(memory.begin(p.num_experts), static_cast<uint32_t>(end));
  });
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(memory.ready());
}

// Expert and features of the tile of this number by what p.offsets holds now, by one warp; expert -1: there is none. The kernels
// before may still write to it: what is found is a guess, and anything may be found.
template <typename SHAPE>
__device__ __forceinline__ GroupedTile guess_tile(const GroupedStreamParams& p, int number) {
  const int num_features = count_feature_tiles(p, SHAPE::kFeatures);
  GroupedTile found{-1, 0, 0, 0};
  visit_experts<SHAPE>(p, [&](int expert, int, int, int before, int until) {
    const uint32_t beyond = __ballot_sync(~0u, expert < p.num_experts && until * num_features > number);
    if (found.expert >= 0 || beyond == 0) return;
    const int owner = __ffs(static_cast<int>(beyond)) - 1, row_tiles = __shfl_sync(~0u, until - before, owner);
    found.expert = __shfl_sync(~0u, expert, owner);
    found.feature_tile = (number - __shfl_sync(~0u, before, owner) * num_features) / max(row_tiles, 1);
  });
  return found;
}

// The list of tiles, once there is one, read by a warp in ascending order.
template <typename SHAPE>
struct GroupedTileList {
  const GroupedStreamMemory<SHAPE> memory;
  const int num_experts, num_features;   // tiles of features of an expert
  int first = 0;                         // of the 32 experts among which the last tile was

  __device__ __forceinline__ GroupedTileList(const GroupedStreamParams& p, const GroupedStreamMemory<SHAPE>& memory)
      : memory(memory), num_experts(p.num_experts), num_features(count_feature_tiles(p, SHAPE::kFeatures)) {
    wait_barrier(memory.ready(), 0);
  }

  // The tile of this number; without rows if there is none.
  __device__ __forceinline__ GroupedTile find(int number) {
    const int lane = threadIdx.x % 32;
    for (; first < num_experts; first += 32) {
      const bool is_beyond = first + lane < num_experts && load(memory.end(first + lane)) * num_features > number;
      const uint32_t beyond = __ballot_sync(~0u, is_beyond);
      if (beyond != 0) return tile_of(first + __ffs(static_cast<int>(beyond)) - 1, number);
    }
    return {0, 0, 0, 0};
  }

 private:
  static __device__ __forceinline__ int load(uint32_t address) { return static_cast<int>(load_shared_4(address)); }

  __device__ __forceinline__ GroupedTile tile_of(int expert, int number) const {
    const int before = expert == 0 ? 0 : load(memory.end(expert - 1)), row_tiles = load(memory.end(expert)) - before;
    const int place = number - before * num_features;
    int feature_tile = place, row_tile = 0;
    if (row_tiles > 1) feature_tile = place / row_tiles, row_tile = place - feature_tile * row_tiles;
    const int first_row = load(memory.begin(expert)) + row_tile * SHAPE::kColumns;
    return {expert, feature_tile, first_row, min(SHAPE::kColumns, load(memory.begin(expert + 1)) - first_row)};
  }
};

// How the warp of weights takes the CTA's tiles and tells the others. By its first lane.
template <typename SHAPE>
struct GroupedTileSource {
  const GroupedStreamMemory<SHAPE> memory;
  int* const counters;   // tiles taken beyond the first of each CTA; CTAs that take no more
  PipelineState<SHAPE::kSlots> slot = {};

  __device__ __forceinline__ int take() const { return static_cast<int>(gridDim.x) + atomicAdd(counters, 1); }

  __device__ __forceinline__ void tell(const GroupedTile& tile) {
    wait_barrier(memory.tile_empty(slot.stage), slot.parity ^ 1);
    store_shared_8(memory.tile(slot.stage), static_cast<uint32_t>(tile.expert), static_cast<uint32_t>(tile.feature_tile));
    store_shared_8(memory.tile(slot.stage) + 8, static_cast<uint32_t>(tile.first_row), static_cast<uint32_t>(tile.num_rows));
    arrive(memory.tile_full(slot.stage));
    slot.advance();
  }

  // When no tile was left: tells each warpgroup of consumers, and the last CTA leaves zeros to the next launch.
  __device__ __forceinline__ void end() {
    for (int i = 0; i < SHAPE::kWarpgroups; ++i) tell({0, 0, 0, 0});
    if (atomicAdd(counters + 1, 1) == static_cast<int>(gridDim.x) - 1) counters[0] = counters[1] = 0;
  }
};

// Tile `index` of the CTA, as a warp of the others is told of it.
template <typename SHAPE>
__device__ __forceinline__ GroupedTile read_tile(const GroupedStreamMemory<SHAPE>& memory, int index) {
  const int slot = index % SHAPE::kSlots;
  wait_barrier(memory.tile_full(slot), index / SHAPE::kSlots % 2);
  const uint4 tile = load_shared_16(memory.tile(slot));
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(memory.tile_empty(slot));
  return {static_cast<int>(tile.x), static_cast<int>(tile.y), static_cast<int>(tile.z), static_cast<int>(tile.w)};
}

}  // namespace slipstream
