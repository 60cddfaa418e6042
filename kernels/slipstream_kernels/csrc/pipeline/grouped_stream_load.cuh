// The producers of the streaming grouped GEMM: a warp that takes tiles and copies their weights, and begins before the kernel
// before has ended; warps that gather rows of x.
#pragma once

#include "mma/warp_mma.cuh"
#include "pipeline/copy_pace.cuh"
#include "pipeline/late_producer.cuh"
#include "ptx/deep_box.cuh"
#include "ptx/hopper_copy.cuh"
#include "schedule/grouped_stream_shape.cuh"

namespace slipstream {

// The first lane copies and tells; all find tiles.
template <typename SHAPE>
struct GroupedWeightProducer {
  static constexpr int kProducer = 0;   // as a test numbers it

  const GroupedStreamParams& p;
  const CUtensorMap& map;
  const GroupedStreamMemory<SHAPE> memory;
  PipelineState<SHAPE::kStages> state = {};

  __device__ __forceinline__ void run() {
    const int num_chunks = p.in_features / SHAPE::kChunk;
    const bool is_first = threadIdx.x % 32 == 0;
    const GroupedTile guessed = guess();
    int num_guessed = is_first ? copy_guessed(guessed, num_chunks) : 0;
    __syncwarp();
    GroupedTileList<SHAPE> list(p, memory);
    GroupedTileSource<SHAPE> source{memory, p.counters};
    GroupedTile tile = list.find(blockIdx.x);
    if (is_first && num_guessed > 0) {
      const bool is_right = tile.num_rows > 0 && tile.expert == guessed.expert && tile.feature_tile == guessed.feature_tile;
      if (!is_right) num_guessed = discard(num_guessed);
      store_shared_4(memory.flip(), is_right ? 0u : 1u);
    }
    while (tile.num_rows > 0) {
      int number = 0;
      if (is_first) {
        source.tell(tile);
        number = source.take();   // comes while weights are asked for
        copy_tile(tile, num_guessed, num_chunks);
        num_guessed = 0;
      }
      tile = list.find(__shfl_sync(~0u, number, 0));
    }
    if (is_first) source.end();
  }

 private:
  // The chunks of a tile, of which the first ones are there.
  __device__ __forceinline__ void copy_tile(const GroupedTile& tile, int chunk, int num_chunks) {
    for (int i = 0; i < chunk; ++i) state.advance();
#pragma unroll 1
    for (; chunk < num_chunks; ++chunk, state.advance()) {
      wait_barrier(memory.empty(state.stage), state.parity ^ 1);   // passes at once in the first round
      delay_late_producer(kProducer);
      copy(state.stage, tile.expert, tile.feature_tile, chunk);
    }
  }

  __device__ __forceinline__ void copy(int stage, int expert, int feature_tile, int chunk) const {
    arrive_expecting(memory.weights_full(stage), SHAPE::kWeightBytes);
    copy_box(memory.weights(stage), &map, memory.weights_full(stage), kReadOnce, chunk * SHAPE::kChunk, 0, 0,
             feature_tile * (SHAPE::kFeatures / 8), expert);
  }

  // The CTA's first tile, as far as it can be known before the kernel before has ended; expert -1: it has none.
  __device__ __forceinline__ GroupedTile guess() const {
    if (p.guess == kGuessByOffsets) return guess_tile<SHAPE>(p, blockIdx.x);
    const int feature_tiles = count_feature_tiles(p, SHAPE::kFeatures), expert = blockIdx.x / feature_tiles;
    if (p.guess == kGuessNothing || expert >= p.num_experts) return {-1, 0, 0, 0};
    return {expert, static_cast<int>(blockIdx.x) % feature_tiles, 0, 0};
  }

  // Copies weights of that tile until the kernel before has ended. Returns the number of chunks.
  __device__ __forceinline__ int copy_guessed(const GroupedTile& tile, int num_chunks) const {
    store_shared_4(memory.flip(), 0u);
    if (tile.expert < 0) return 0;
    const CopyPace pace(p.copy_pace, memory.ready());
    int stage = 0;
#pragma unroll 1
    for (; stage < min(num_chunks, SHAPE::kStages); ++stage) {
      pace.wait(stage * SHAPE::kWeightBytes);
      if (has_ended(memory.ready(), 0)) break;
      copy(stage, tile.expert, tile.feature_tile, stage);
    }
    return stage;
  }

  // After a wrong guess: all stages are in the second phase of their barriers, and consumers wait for that. Returns 0.
  __device__ __forceinline__ int discard(int num_guessed) const {
    for (int stage = 0; stage < SHAPE::kStages; ++stage) {
      if (stage < num_guessed) wait_barrier(memory.weights_full(stage), 0);
      else arrive(memory.weights_full(stage));
    }
    return 0;
  }
};

// Arrives when the copies that this thread has asked for have ended.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Eight lanes copy the 128 bytes of a row's chunk, in the order of the 128-byte swizzle, and the first of them its scale if
// there is one. Rows that the tile does not have are left as they are: nobody writes their sums.
template <typename SHAPE>
struct GroupedRowProducer {
  static constexpr int kProducer = 1, kRows = SHAPE::kColumns / (4 * SHAPE::kRowWarps);   // of a lane

  const GroupedStreamParams& p;
  const GroupedStreamMemory<SHAPE> memory;
  const int warp;   // of the warps of rows
  PipelineState<SHAPE::kStages> state = {};

  __device__ __forceinline__ void run() {
    const int num_chunks = p.in_features / SHAPE::kChunk;
#pragma unroll 1
    for (int index = 0;; ++index) {
      const GroupedTile tile = read_tile(memory, index);
      if (tile.num_rows == 0) return;
      int rows[kRows];   // of x
#pragma unroll
      for (int i = 0; i < kRows; ++i) rows[i] = row(i) < tile.num_rows ? row_of_x(tile.first_row + row(i)) : 0;
#pragma unroll 1
      for (int chunk = 0; chunk < num_chunks; ++chunk, state.advance()) {
        wait_barrier(memory.empty(state.stage), state.parity ^ 1);
        delay_late_producer(kProducer);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (row(i) < tile.num_rows) copy(row(i), rows[i], chunk);
        }
        arrive_after_copies(memory.rows_full(state.stage));
      }
    }
  }

 private:
  static __device__ __forceinline__ int piece() { return threadIdx.x % 8; }
  __device__ __forceinline__ int row(int i) const { return static_cast<int>(threadIdx.x % 32 / 8) + 4 * (i * SHAPE::kRowWarps + warp); }

  // That a row of the product takes.
  __device__ __forceinline__ int row_of_x(int product_row) const {
    return p.tokens == nullptr ? product_row : __ldcg(p.tokens + product_row);
  }

  __device__ __forceinline__ void copy(int row, int of_x, int chunk) const {
    const char* from = static_cast<const char*>(p.x) + of_x * p.x_row_stride * static_cast<int64_t>(sizeof(typename SHAPE::Operand));
    copy_async<16>(memory.rows(state.stage) + 128 * row + 16 * (piece() ^ row % 8), from + 128 * chunk + 16 * piece());
    if constexpr (SHAPE::kHasBlockScales) {
      if (piece() == 0) copy_async<4>(memory.row_scales(state.stage) + 4 * row, p.x_scale + chunk * p.x_scale_stride + of_x);
    }
  }
};

}  // namespace slipstream
