// The loading threads of a product by clusters: fill the ring, with weights before the kernel before has ended.
//
// One of each of four warps: issuing a copy takes a thread some 50 ns, and memory asks for a chunk's five or six in
// less than those take together. The first brings activations and announces what all bring, the others bring weights.
#pragma once

#include "schedule/swap_ab_shape.cuh"
#include "ptx/dependent_launch.cuh"

namespace slipstream {

template <typename SHAPE>
struct SwapAbProducer {
  const SwapAbParams& p;
  const SwapAbMaps& maps;
  const SwapAbMemory<SHAPE> memory;
  const SwapAbShare<SHAPE> share;
  const int warp;

  // The stages of all passes, in order.
  struct Walk {
    const SwapAbShare<SHAPE>& share;
    int num_stages;
    int chunk = share.begin_chunk, pass = 0;
    UnitRange units = share.units_of(0);
    StagePlace place = {};

    __device__ __forceinline__ bool has_more() const { return pass < share.num_passes; }

    __device__ __forceinline__ void advance() {
      place.advance(num_stages);
      if (++chunk < share.end_chunk) return;
      chunk = share.begin_chunk;
      if (++pass < share.num_passes) units = share.units_of(pass);
    }
  };

  __device__ __forceinline__ void run() const {
    if (warp == 0) await_previous();
    for (Walk walk{share, memory.num_stages}; walk.has_more(); walk.advance()) {
      wait_barrier(memory.empty(walk.place.stage), walk.place.parity ^ 1);   // in the first round it is
      if (warp == 0) load_tokens(walk);
      else load_weights(walk);
    }
  }

 private:
  // Boxes of four units, then single ones, each by the warp whose turn it is.
  __device__ __forceinline__ void load_weights(const Walk& walk) const {
    const uint32_t barrier = memory.full(walk.place.stage);
    const int x = walk.chunk * SHAPE::kChunk, end = walk.units.end;
    uint32_t to = memory.weights(walk.place.stage);
    int unit = walk.units.begin, turn = 1;
    for (; unit + 4 <= end; unit += 4, to += 4 * SHAPE::kUnitBytes, turn = next(turn)) {
      if (turn == warp) copy_box(to, &maps.weights, barrier, kReadOnce, x, 0, 0, unit);
    }
    for (; unit < end; ++unit, to += SHAPE::kUnitBytes, turn = next(turn)) {
      if (turn == warp) copy_box(to, &maps.unit, barrier, kReadOnce, x, 0, 0, unit);
    }
  }

  static __device__ __forceinline__ int next(int turn) { return turn + 1 == SHAPE::kLoaders ? 1 : turn + 1; }

  // Announces all bytes of the stage, too.
  __device__ __forceinline__ void load_tokens(const Walk& walk) const {
    const int stage = walk.place.stage, weight_bytes = (walk.units.end - walk.units.begin) * SHAPE::kUnitBytes;
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
