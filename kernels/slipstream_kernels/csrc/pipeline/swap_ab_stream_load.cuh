// The producer threads: one brings weights, and begins before the kernel before has ended; one brings tokens.
// A stage has one copy of weights and one of tokens, each a single box.
#pragma once

#include "pipeline/copy_pace.cuh"
#include "pipeline/dynamic_pipeline_state.cuh"
#include "pipeline/late_producer.cuh"
#include "ptx/dependent_launch.cuh"
#include "schedule/swap_ab_stream_shape.cuh"

namespace slipstream {

template <typename SHAPE>
struct StreamProducer {
  static constexpr int kWeights = 0, kTokens = 1;   // producers, as a test numbers them

  const SwapAbStreamParams& p;
  const StreamMaps& maps;
  const StreamMemory<SHAPE> memory;
  const StreamWork work;

  // A position in the CTA's run.
  struct Walk {
    int num_stages, num_chunks, left, tile, chunk;
    DynamicPipelineState state = {};

    __device__ __forceinline__ Walk(const StreamWork& work, int num_stages)
        : num_stages(num_stages), num_chunks(static_cast<int>(work.runs.num_chunks)), left(work.end - work.begin),
          tile(work.begin / num_chunks), chunk(work.begin - tile * num_chunks) {}

    // Whether the next chunk is of the next tile.
    __device__ __forceinline__ bool advance() {
      state.advance(num_stages);
      --left;
      if (++chunk < num_chunks) return false;
      chunk = 0, ++tile;
      return true;
    }
  };

  __device__ __forceinline__ void run_weights() const {
    const uint32_t bytes = stream_tile_units(p) * SHAPE::kUnitBytes;
    Walk walk(work, memory.num_stages);
    const CopyPace pace(p.copy_pace, memory.empty(0));
    int unit = work.begin_unit(p, walk.tile), num_stages = 0;
#pragma unroll 1
    for (; walk.left > 0; ++num_stages) {
      const int stage = walk.state.stage;
      wait_barrier(memory.empty(stage), walk.state.parity ^ 1);   // passes at once in the first round
      delay_late_producer(kWeights);
      if (num_stages < memory.num_stages) pace.wait(num_stages * static_cast<int>(bytes));
      arrive_expecting(memory.full(stage), bytes);
      copy_box(memory.weights(stage), &maps.weights, memory.full(stage), kReadOnce, walk.chunk * 128, 16 * unit);
      if (walk.advance()) unit = work.begin_unit(p, walk.tile);   // divides: once a tile
    }
  }

  __device__ __forceinline__ void run_tokens() const {
    await_previous();
#pragma unroll 1
    for (Walk walk(work, memory.num_stages); walk.left > 0; walk.advance()) {
      const int stage = walk.state.stage;
      wait_barrier(memory.empty(stage), walk.state.parity ^ 1);
      delay_late_producer(kTokens);
      arrive_expecting(memory.full(stage), SHAPE::kTokenBytes);
      copy_box(memory.tokens(stage), &maps.tokens, memory.full(stage), kReadOften, walk.chunk * 128, 0);
    }
  }
};

}  // namespace slipstream
