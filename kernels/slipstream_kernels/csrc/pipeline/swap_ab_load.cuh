// The producer threads: fill the ring, with weights already before the kernel before has ended.
//
// One thread of each of four warps: issuing a copy takes a thread some 50 ns, and five or six copies of a chunk in one
// thread would be slower than memory. The first thread brings activations and announces all bytes, the others bring weights.
// A stage is full when all four have arrived, also those that have no box of it: one that nobody waited for could be two
// rounds late, and would wait for a parity that has come and gone.
#pragma once

#include "pipeline/copy_pace.cuh"
#include "pipeline/dynamic_pipeline_state.cuh"
#include "pipeline/late_producer.cuh"
#include "ptx/dependent_launch.cuh"
#include "schedule/swap_ab_shape.cuh"

namespace slipstream {

template <typename SHAPE>
struct SwapAbProducer {
  const SwapAbParams& p;
  const SwapAbMaps& maps;
  const SwapAbMemory<SHAPE> memory;
  const SwapAbWork<SHAPE> work;
  const int warp;

  // The stages of all passes, in order.
  struct Walk {
    const SwapAbWork<SHAPE>& work;
    int num_stages;
    int chunk = work.begin_chunk, pass = 0;
    WorkRange units = work.units_of(0);
    DynamicPipelineState state = {};

    __device__ __forceinline__ bool has_more() const { return pass < work.num_passes; }

    __device__ __forceinline__ void advance() {
      state.advance(num_stages);
      if (++chunk < work.end_chunk) return;
      chunk = work.begin_chunk;
      if (++pass < work.num_passes) units = work.units_of(pass);
    }
  };

  __device__ __forceinline__ void run() const {
    if (warp == 0) await_previous();
    const CopyPace pace(p.copy_pace, memory.empty(0));
    int num_stages = 0;
    for (Walk walk{work, memory.num_stages}; walk.has_more(); walk.advance(), ++num_stages) {
      delay_late_producer(warp);
      wait_barrier(memory.empty(walk.state.stage), walk.state.parity ^ 1);   // passes at once in the first round
      if (warp == 0) {
        load_tokens(walk);
      } else {
        if (num_stages < memory.num_stages) pace.wait(num_stages * memory.stage_bytes);
        load_weights(walk);
      }
    }
  }

 private:
  // Boxes of four units, then of one; the warps take them in turn.
  __device__ __forceinline__ void load_weights(const Walk& walk) const {
    const uint32_t barrier = memory.full(walk.state.stage);
    const int x = walk.chunk * SHAPE::kChunk, end = walk.units.end;
    uint32_t to = memory.weights(walk.state.stage);
    int unit = walk.units.begin, turn = 1;
    for (; unit + 4 <= end; unit += 4, to += 4 * SHAPE::kUnitBytes, turn = next(turn)) {
      if (turn == warp) copy_box(to, &maps.weights, barrier, kReadOnce, x, 0, 0, unit);
    }
    for (; unit < end; ++unit, to += SHAPE::kUnitBytes, turn = next(turn)) {
      if (turn == warp) copy_box(to, &maps.unit, barrier, kReadOnce, x, 0, 0, unit);
    }
    arrive(barrier);
  }

  static __device__ __forceinline__ int next(int turn) { return turn + 1 == SHAPE::kProducerWarps ? 1 : turn + 1; }

  // Also announces all bytes of the stage.
  __device__ __forceinline__ void load_tokens(const Walk& walk) const {
    const int stage = walk.state.stage, weight_bytes = (walk.units.end - walk.units.begin) * SHAPE::kUnitBytes;
    const uint32_t barrier = memory.full(stage);
    arrive_expecting(barrier, weight_bytes + SHAPE::kTokenBytes + scale_bytes());
    copy_box(memory.tokens(stage), &maps.tokens, barrier, kReadOften, walk.chunk * SHAPE::kChunk, 0);
    if constexpr (SHAPE::Format::kIsByBlocks) {
      copy_bytes(memory.stage_scales(stage), p.x_scale + walk.chunk * p.x_scale_stride, barrier, scale_bytes());
    }
  }

  // Groups of scales are padded to 16 bytes.
  __device__ __forceinline__ int scale_bytes() const {
    return SHAPE::Format::kIsByBlocks ? (p.num_tokens + 3) / 4 * 16 : 0;
  }
};

}  // namespace slipstream
