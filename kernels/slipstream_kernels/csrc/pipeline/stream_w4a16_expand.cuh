// The warpgroups of the streaming W4A16 product that expand: each writes (code - zero) * scale of every second slab, rounded
// once, to shared memory, where rows of 64 features lie as the 128-byte swizzle has them.
#pragma once

#include "formats/int4_converter.cuh"
#include "schedule/stream_w4a16_shape.cuh"

namespace slipstream {

// What a lane has of a slab of a unit. A word has the features at 4 (l % 4) and 16 further of each 32, for row l / 4 (x) and the
// row 8 further (y) (int4_layout.py). Odd rows have the two words of a row in the other order, so that a half-warp's
// stores touch all banks.
template <typename SHAPE>
struct StreamW4A16Codes {
  using T = typename SHAPE::Out;
  static constexpr int kGroups = SHAPE::kGroupsOfChunk;
  uint2 words[2];
  uint32_t scales[2];

  __device__ __forceinline__ void load(const StreamW4A16Memory<SHAPE>& memory, int stage, int slab, int unit, int lane) {
    const int row = lane / 4, odd = row % 2, group = kGroups == 2 ? slab : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words[i] = load_shared_8(memory.codes(stage) + unit * 1024 + slab * 512 + (i ^ odd) * 256 + lane * 8);
      scales[i] = load_shared_4(memory.scales(stage) + ((unit * 16 + row + 8 * i) * kGroups + group) * 4);
    }
  }

  // to: the unit's rows of the slab.
  __device__ __forceinline__ void expand(int lane, uint32_t to) const {
    const int row = lane / 4, quad = lane % 4;
    const ScaledInt4Converter<T> upper(scales[0]), lower(scales[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t piece = 4 * (i ^ row % 2) + quad / 2, at = to + row * 128 + quad % 2 * 8;
      store(at, piece, row, upper, words[i].x);
      store(at + 8 * 128, piece, row, lower, words[i].y);
    }
  }

 private:
  // piece: of 16 bytes of a row, of the word's first four features; its others are two pieces further.
  static __device__ __forceinline__ void store(uint32_t at, uint32_t piece, uint32_t row,
                                               const ScaledInt4Converter<T>& converter, uint32_t word) {
    uint32_t pairs[4];
    converter.expand_in_order(word, pairs);
    store_shared_8(at + ((piece ^ row) * 16), pairs[0], pairs[1]);
    store_shared_8(at + (((piece + 2) ^ row) * 16), pairs[2], pairs[3]);
  }
};

template <typename SHAPE>
struct StreamW4A16Expander {
  static constexpr int kUnits = SHAPE::kUnits / 4;   // of a warp

  const StreamW4A16Memory<SHAPE> memory;
  const int slab, warp, lane = threadIdx.x % 32;   // slab of each chunk

  __device__ __forceinline__ void run(int num_chunks) const {
    PipelineState<SHAPE::kStages> state;
    PipelineState<SHAPE::kCodeStages> codes;
    if (slab == 1) state.advance();
#pragma unroll 1
    for (int chunk = 0; chunk < num_chunks; ++chunk, codes.advance()) {
      StreamW4A16Codes<SHAPE> of_units[kUnits];
      wait_barrier(memory.code_full(codes.stage), codes.parity);
#pragma unroll
      for (int i = 0; i < kUnits; ++i) of_units[i].load(memory, codes.stage, slab, 4 * i + warp, lane);
      wait_barrier(memory.empty(state.stage), state.parity ^ 1);   // passes at once in the first round
#pragma unroll
      for (int i = 0; i < kUnits; ++i) of_units[i].expand(lane, memory.weights(state.stage) + (4 * i + warp) * 16 * 128);
      fence_shared_for_engines();
      arrive_warp(memory.full(state.stage));
      // Not before: loads of codes may still be under way then, and read those of a later chunk.
      if (lane == 0) arrive(memory.code_empty(codes.stage));
      state.advance(), state.advance();
    }
  }

 private:
  __device__ __forceinline__ void arrive_warp(uint32_t barrier) const {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  }
};

}  // namespace slipstream
