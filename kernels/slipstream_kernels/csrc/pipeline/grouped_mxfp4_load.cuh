// What the grouped GEMM with MXFP4 weights reads: each warp streams its weights, each team its rows of x, to rings in
// shared memory.
#pragma once

#include "mma/warp_mma.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/hopper_copy.cuh"
#include "schedule/grouped_mxfp4_shape.cuh"

namespace slipstream {

// The units of a warp, which follow each other in memory.
template <typename SHAPE>
struct Mxfp4Weights {
  const char* from;         // the first unit that has not been asked for
  int units;                // of those
  uint32_t ring, barriers;  // one barrier a stage
  PipelineState<SHAPE::kStages> place;

  __device__ __forceinline__ Mxfp4Weights(const char* first, int num_units, uint32_t memory, uint32_t full)
      : from(first), units(num_units), ring(memory), barriers(full) {
    if (threadIdx.x % 32 < SHAPE::kStages) init_barrier(barriers + 8 * (threadIdx.x % 32), 1);
    publish_barriers();
    __syncwarp();
    for (int i = 0; i < SHAPE::kStages; ++i) copy(i);
  }

  __device__ __forceinline__ uint32_t wait() const {
    wait_barrier(barriers + 8 * place.stage, place.parity);
    return ring + place.stage * SHAPE::kStageBytes;
  }

  // The warp has read the stage.
  __device__ __forceinline__ void release() {
    __syncwarp();
    copy(place.stage);
    place.advance();
  }

 private:
  __device__ __forceinline__ void copy(int stage) {
    if (units <= 0) return;
    if (threadIdx.x % 32 == 0) {
      const int bytes = min(units, SHAPE::kStageUnits) * SHAPE::Unit::kBytes;
      arrive_expecting(barriers + 8 * stage, bytes);
      copy_bulk(ring + stage * SHAPE::kStageBytes, from, bytes, barriers + 8 * stage, evict_first_policy());
    }
    from += SHAPE::kStageBytes;
    units -= SHAPE::kStageUnits;
  }
};

// The rows of x of a team. A row of a stage has 128 bytes of each unit: 8 chunks, which of odd rows change places in pairs,
// so that the eight lanes of a read (two rows, every other chunk) meet different banks.
template <typename SHAPE>
struct Mxfp4Rows {
  static constexpr int kColumns = SHAPE::kColumns;

  const __nv_bfloat16* const* pointers;   // of the tile's rows, in shared memory
  int num_rows, in_features, next, end;   // input features: all, the first not asked for, and where the team's end
  uint32_t memory;
  int stage = SHAPE::kRowStages - 1;      // of what is read

  __device__ __forceinline__ Mxfp4Rows(const __nv_bfloat16* const* of_rows, int rows, int inputs, int first, int last,
                                       uint32_t team_memory)
      : pointers(of_rows), num_rows(rows), in_features(inputs), next(first), end(last), memory(team_memory) {
    for (int i = 0; i < SHAPE::kRowStages - 1; ++i) copy(i);
  }

  // Waits for the next stage; all warps of the team are done with the one before it.
  __device__ __forceinline__ void advance(int team) {
    wait_for_copies<SHAPE::kRowStages - 2>();
    if constexpr (SHAPE::kTeamWarps == 1) {
      __syncwarp();
    } else {
      // Barriers are numbered by constants: with a number in a register a CTA reserves all 16, and an SM has 64, for four CTAs.
#pragma unroll
      for (int i = 0; i < SHAPE::kTeams; ++i) {
        if (i == team) sync_threads(1 + i, SHAPE::kTeamThreads);
      }
    }
    copy(stage);
    stage = stage + 1 == SHAPE::kRowStages ? 0 : stage + 1;
  }

  // Eight input features of the lane's row of each column.
  __device__ __forceinline__ void read(int unit, int word, uint32_t (&pairs)[kColumns][4]) const {
    const int lane = threadIdx.x % 32, row = lane / 4, chunk = (2 * (lane % 4) + word) ^ (row & 1);
    const uint32_t from = memory + stage * SHAPE::kRowStageBytes + row * SHAPE::kRowBytes + 128 * unit + 16 * chunk;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const uint4 raw = load_shared_16(from + 8 * column * SHAPE::kRowBytes);
      pairs[column][0] = raw.x, pairs[column][1] = raw.y, pairs[column][2] = raw.z, pairs[column][3] = raw.w;
    }
  }

 private:
  // Input features beyond the row's end are zero. A row that does not exist is left as it is: nobody writes its sums.
  __device__ __forceinline__ void copy(int to_stage) {
    constexpr int kChunks = 8 * SHAPE::kRowUnits, kSteps = SHAPE::kTileRows * kChunks / SHAPE::kTeamThreads;
    const int thread = threadIdx.x % SHAPE::kTeamThreads;
    if (next < end) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int item = i * SHAPE::kTeamThreads + thread, row = item / kChunks, chunk = item % kChunks;
        if (row < num_rows) {
          const int feature = next + 8 * chunk;
          const uint32_t to = memory + to_stage * SHAPE::kRowStageBytes + row * SHAPE::kRowBytes;
          const bool is_inside = feature < in_features;
          copy_async_or_zero<16>(to + 16 * (chunk ^ (row & 1)), pointers[row] + (is_inside ? feature : 0), is_inside);
        }
      }
      next += SHAPE::Unit::kInputs * SHAPE::kRowUnits;
    }
    commit_copies();
  }
};

}  // namespace slipstream
