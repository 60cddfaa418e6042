// The multiplying warps: each has its own block of 128 input features of every slot; activations stay in registers.
#pragma once

#include "ptx/hopper_copy.cuh"
#include "formats/int4_codec.cuh"
#include "schedule/int4_rows_shape.cuh"

namespace slipstream {

// A warp's activations of its block, as they lie in memory: lane l has, of token l / 4 of each column and of each 32
// input features, four from 4 (l % 4) on and the four that are 16 further.
template <typename SHAPE>
struct BlockActivations {
  uint32_t raw[SHAPE::kColumns][4][4];

  __device__ __forceinline__ void load(const Int4RowsParams& p, int block) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int column = 0; column < SHAPE::kColumns; ++column) {
      const int token = 8 * column + lane / 4;
      const bool exists = token < p.num_tokens && block < num_blocks(p);
      const auto* from = static_cast<const typename SHAPE::Operand*>(p.x) + token * p.x_row_stride + block * 128 +
                         lane % 4 * 4;
#pragma unroll
      for (int step = 0; step < 4; ++step) load_step(raw[column][step], from + 32 * step, exists);
    }
  }

  // The B operand of the two products of a step: pairs (4 q + i, 16 + 4 q + i), i = 0..3.
  __device__ __forceinline__ void arrange(int column, int step, uint32_t (&pairs)[4]) const {
    const uint32_t(&v)[4] = raw[column][step];
    pairs[0] = __byte_perm(v[0], v[2], 0x5410), pairs[1] = __byte_perm(v[0], v[2], 0x7632);
    pairs[2] = __byte_perm(v[1], v[3], 0x5410), pairs[3] = __byte_perm(v[1], v[3], 0x7632);
  }

 private:
  template <typename T>
  static __device__ __forceinline__ void load_step(uint32_t (&to)[4], const T* from, bool exists) {
    const uint2 low = exists ? load_global_8(from) : uint2{}, high = exists ? load_global_8(from + 16) : uint2{};
    to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
  }
};

// The operands of a block's products, arranged once for all strips of a pass.
template <typename SHAPE>
struct BlockOperands {
  uint32_t of[SHAPE::kColumns][4][4];

  __device__ __forceinline__ explicit BlockOperands(const BlockActivations<SHAPE>& x) {
#pragma unroll
    for (int column = 0; column < SHAPE::kColumns; ++column) {
#pragma unroll
      for (int step = 0; step < 4; ++step) x.arrange(column, step, of[column][step]);
    }
  }
};

template <typename SHAPE>
struct RowSums {
  float of[SHAPE::kTiles][SHAPE::kColumns][4] = {};   // as mma has them: rows l / 4 and + 8, tokens 2 (l % 4) + 0, 1
};

template <typename SHAPE>
struct RowsConsumer {
  using T = typename SHAPE::Operand;
  const Int4RowsParams& p;
  uint32_t ring, barriers;   // shared addresses
  RingPlace<SHAPE::kSlots> place;
  BlockActivations<SHAPE> x;   // of the next chunk
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __device__ __forceinline__ void consume_pass(int num_strips, RowSums<SHAPE>& sums) {
    const int chunks = num_chunks<SHAPE>(p);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int block = chunk * SHAPE::kWarps + warp;
      const BlockOperands<SHAPE> now(x);
      // Read one chunk ahead: the latency of L2 passes while this chunk is multiplied.
      x.load(p, chunk + 1 == chunks ? warp : block + SHAPE::kWarps);
      multiply_chunk(num_strips, block < num_blocks(p), now, sums);
    }
  }

 private:
  // The warp's block of a slot, in registers: the slot is free at once.
  struct Codes {
    uint2 eights[4];
    uint32_t words[SHAPE::kGroups][2];
  };

  __device__ __forceinline__ void multiply_chunk(int num_strips, bool has_block, const BlockOperands<SHAPE>& now,
                                                 RowSums<SHAPE>& sums) {
    Codes codes[2];   // of a slot, and of the next
    codes[0] = take_slot();
#pragma unroll
    for (int tile = 0; tile < SHAPE::kTiles; ++tile) {
      if (tile >= num_strips) break;
      if (tile + 1 < num_strips) codes[(tile + 1) % 2] = take_slot();
      if (has_block) multiply(codes[tile % 2], now, sums.of[tile]);
    }
  }

  __device__ __forceinline__ Codes take_slot() {
    const uint32_t filled = barriers + 16 * place.stage, slot = ring + place.stage * SHAPE::kSlotBytes;
    const uint32_t words = slot + SHAPE::kWordOffset + (p.is_channelwise != 0 ? 0 : warp * SHAPE::kWordBytes);
    wait_barrier(filled, place.parity);
    Codes codes;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      codes.eights[step] = load_shared_8(slot + warp * SHAPE::kBlockBytes + step * 256 + lane * 8);
    }
#pragma unroll
    for (int group = 0; group < SHAPE::kGroups; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        codes.words[group][half] = load_shared_4(words + ((lane / 4 + 8 * half) * SHAPE::kGroups + group) * 4);
      }
    }
    __syncwarp();
    if (lane == 0) arrive(filled + 8);
    place.advance();
    return codes;
  }

  // Two halves of the block have sums of their own: the chains of products are shorter, and groups of 64 need them.
  __device__ __forceinline__ void multiply(const Codes& codes, const BlockOperands<SHAPE>& now,
                                           float (&sums)[SHAPE::kColumns][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float parts[SHAPE::kColumns][4] = {};
      const auto& words = codes.words[half * (SHAPE::kGroups - 1)];
      const Codec<T> upper(words[0] >> 16), lower(words[1] >> 16);
#pragma unroll
      for (int step = 2 * half; step < 2 * half + 2; ++step) {
        multiply_step(codes.eights[step], upper, lower, step, now, parts);
      }
#pragma unroll
      for (int column = 0; column < SHAPE::kColumns; ++column) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[column][e] += scale_of(words[e / 2]) * parts[column][e];
      }
    }
  }

  static __device__ __forceinline__ void multiply_step(const uint2& eight, const Codec<T>& upper, const Codec<T>& lower,
                                                       int step, const BlockOperands<SHAPE>& now,
                                                       float (&parts)[SHAPE::kColumns][4]) {
    uint32_t top[4], bottom[4];
    upper.expand(eight.x, top);
    lower.expand(eight.y, bottom);
#pragma unroll
    for (int product = 0; product < 2; ++product) {
      const uint32_t a[4] = {top[2 * product], bottom[2 * product], top[2 * product + 1], bottom[2 * product + 1]};
#pragma unroll
      for (int column = 0; column < SHAPE::kColumns; ++column) {
        const auto& b = now.of[column][step];
        multiply_add<T>(parts[column], a, b[2 * product], b[2 * product + 1]);
      }
    }
  }
};

}  // namespace slipstream
