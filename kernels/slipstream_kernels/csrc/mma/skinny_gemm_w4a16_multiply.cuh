// The consumer warps: each has its own block of 128 input features of every stage; activations stay in registers.
#pragma once

#include "ptx/hopper_copy.cuh"
#include "formats/int4_converter.cuh"
#include "schedule/skinny_gemm_w4a16_shape.cuh"

namespace slipstream {

// A warp's activations of its block, as loaded from memory. For token l / 4 of each column, lane l has the four features
// from 4 (l % 4) on in each 32, and the four that are 16 further.
template <typename SHAPE>
struct BlockActivations {
  uint32_t raw[SHAPE::kColumns][4][4];

  __device__ __forceinline__ void load(const SkinnyGemmW4A16Params& p, int block) {
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

// The B operands of a block's products, made once for all tiles of a pass.
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
struct SkinnyGemmW4A16Sums {
  float of[SHAPE::kTiles][SHAPE::kColumns][4] = {};   // mma's fragment: rows l / 4 and + 8, tokens 2 (l % 4) + 0, 1
};

template <typename SHAPE>
struct SkinnyGemmW4A16Consumer {
  using T = typename SHAPE::Operand;
  const SkinnyGemmW4A16Params& p;
  uint32_t ring, barriers;   // shared addresses
  PipelineState<SHAPE::kStages> state;
  BlockActivations<SHAPE> x;   // of the next chunk
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __device__ __forceinline__ void consume_pass(int num_tiles, SkinnyGemmW4A16Sums<SHAPE>& sums) {
    const int chunks = num_chunks<SHAPE>(p);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int block = chunk * SHAPE::kWarps + warp;
      const BlockOperands<SHAPE> now(x);
      // Loads one chunk ahead, to hide the latency of L2.
      x.load(p, chunk + 1 == chunks ? warp : block + SHAPE::kWarps);
      multiply_chunk(num_tiles, block < num_blocks(p), now, sums);
    }
  }

 private:
  // The warp's block of a stage, copied to registers.
  struct Weights {
    uint2 qweight[4];
    uint32_t packed_scales[SHAPE::kGroups][2];
    uint32_t empty;   // the stage's barrier
  };

  __device__ __forceinline__ void multiply_chunk(int num_tiles, bool has_block, const BlockOperands<SHAPE>& now,
                                                 SkinnyGemmW4A16Sums<SHAPE>& sums) {
    Weights weights[2];   // of a stage, and of the next
    weights[0] = take_stage();
#pragma unroll
    for (int tile = 0; tile < SHAPE::kTiles; ++tile) {
      if (tile >= num_tiles) break;
      if (tile + 1 < num_tiles) weights[(tile + 1) % 2] = take_stage();
      if (has_block) multiply(weights[tile % 2], now, sums.of[tile]);
      release(weights[tile % 2]);
    }
  }

  // Not before the weights have been multiplied: their loads may still be under way, and would find those that follow.
  __device__ __forceinline__ void release(const Weights& weights) const {
    __syncwarp();
    if (lane == 0) arrive(weights.empty);
  }

  __device__ __forceinline__ Weights take_stage() {
    const uint32_t full = barriers + 16 * state.stage, stage = ring + state.stage * SHAPE::kStageBytes;
    const uint32_t scales = stage + SHAPE::kScaleOffset + (p.is_channelwise != 0 ? 0 : warp * SHAPE::kScaleBytes);
    wait_barrier(full, state.parity);
    Weights weights;
    weights.empty = full + 8;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      weights.qweight[step] = load_shared_8(stage + warp * SHAPE::kBlockBytes + step * 256 + lane * 8);
    }
#pragma unroll
    for (int group = 0; group < SHAPE::kGroups; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        weights.packed_scales[group][half] = load_shared_4(scales + ((lane / 4 + 8 * half) * SHAPE::kGroups + group) * 4);
      }
    }
    state.advance();
    return weights;
  }

  // The two halves of the block have separate sums: shorter chains of products, and groups of 64 have separate scales.
  __device__ __forceinline__ void multiply(const Weights& weights, const BlockOperands<SHAPE>& now,
                                           float (&sums)[SHAPE::kColumns][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float parts[SHAPE::kColumns][4] = {};
      const auto& scales = weights.packed_scales[half * (SHAPE::kGroups - 1)];
      const Int4Converter<T> upper(scales[0] >> 16), lower(scales[1] >> 16);
#pragma unroll
      for (int step = 2 * half; step < 2 * half + 2; ++step) {
        multiply_step(weights.qweight[step], upper, lower, step, now, parts);
      }
#pragma unroll
      for (int column = 0; column < SHAPE::kColumns; ++column) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[column][e] += scale_of(scales[e / 2]) * parts[column][e];
      }
    }
  }

  static __device__ __forceinline__ void multiply_step(const uint2& qweight, const Int4Converter<T>& upper, const Int4Converter<T>& lower,
                                                       int step, const BlockOperands<SHAPE>& now,
                                                       float (&parts)[SHAPE::kColumns][4]) {
    uint32_t top[4], bottom[4];
    upper.expand(qweight.x, top);
    lower.expand(qweight.y, bottom);
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
