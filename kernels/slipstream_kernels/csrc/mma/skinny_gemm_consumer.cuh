// The consumer warps: each multiplies its own columns of every stage by all tokens; their sums are added in a fixed order at
// the end of a pass.
#pragma once

#include "ptx/hopper_copy.cuh"
#include "schedule/skinny_gemm_walk.cuh"
#include "mma/warp_mma.cuh"

namespace slipstream {

// One warp's activations of a chunk as B operands: lane l holds those of token l / 4 of each column.
template <typename SHAPE>
struct Operands {
  uint32_t pairs[SHAPE::kSpans][SHAPE::kColumns][SHAPE::Format::kSteps][2];
  float factors[SHAPE::kColumns][2];   // of the sums of tokens 2 (l % 4) + 0, 1
};

// The same as loaded from memory.
template <typename SHAPE>
struct Activations {
  using Format = typename SHAPE::Format;
  static constexpr int kVectors = Format::kElements / 8;
  uint4 raw[SHAPE::kSpans][SHAPE::kColumns][kVectors];

  // first: the warp's first column. Missing tokens and columns are zero.
  __device__ __forceinline__ void load(const SkinnyGemmParams& p, int first) {
    const int lane = threadIdx.x % 32;
    using T = typename SHAPE::Operand;
#pragma unroll
    for (int span = 0; span < SHAPE::kSpans; ++span) {
#pragma unroll
      for (int column = 0; column < SHAPE::kColumns; ++column) {
        const int token = 8 * column + lane / 4, start = first + span * SHAPE::kSpanElements;
        const bool exists = token < p.num_tokens && start < p.in_features;
        const T* from = static_cast<const T*>(p.x) + token * p.x_row_stride + start + lane % 4 * Format::kElements;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          raw[span][column][i] = exists ? load_global_16(from + 8 * i) : make_uint4(0, 0, 0, 0);
        }
      }
    }
  }

  __device__ __forceinline__ void arrange(Operands<SHAPE>& operands) const {
#pragma unroll
    for (int column = 0; column < SHAPE::kColumns; ++column) {
      uint32_t scale = 0;
      if constexpr (Format::kIsRescaled) scale = rescale(column, operands.factors[column]);
#pragma unroll
      for (int span = 0; span < SHAPE::kSpans; ++span) {
        Format::arrange(raw[span][column], scale, operands.pairs[span][column]);
      }
    }
  }

 private:
  // The power of two, as two bf16, that brings the largest of this lane's token to 2^14..2^15. factors: its inverses.
  __device__ __forceinline__ uint32_t rescale(int column, float (&factors)[2]) const {
    constexpr uint32_t kMagnitude = 0x7fff7fffu, kLargestField = 253;
    uint32_t two = 0;
#pragma unroll
    for (int span = 0; span < SHAPE::kSpans; ++span) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const uint4& v = raw[span][column][i];
        two = __vmaxu2(__vmaxu2(__vmaxu2(two, v.x & kMagnitude), __vmaxu2(v.y & kMagnitude, v.z & kMagnitude)),
                       v.w & kMagnitude);
      }
    }
    uint32_t largest = max(two & 0xffffu, two >> 16);
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    // Exponent fields: of the largest, 127 + 14 - that of the scale around 127, and the inverse's.
    const uint32_t field = min(268u - (largest >> 7), kLargestField);
    const float inverse = __uint_as_float((254u - field) << 23);
#pragma unroll
    for (int e = 0; e < 2; ++e) factors[e] = __shfl_sync(0xffffffffu, inverse, threadIdx.x % 4 * 8 + 4 * e);
    return field << 23 | field << 7;
  }
};

// A pass's sums of one warp: of[tile][column] as mma lays them out, rows l / 4 and l / 4 + 8, tokens 2 (l % 4) + 0, 1.
template <typename SHAPE>
struct Sums {
  float of[SHAPE::kTiles][SHAPE::kColumns][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < SHAPE::kTiles; ++tile) {
#pragma unroll
      for (int column = 0; column < SHAPE::kColumns; ++column) {
#pragma unroll
        for (int e = 0; e < 4; ++e) of[tile][column][e] = 0.0f;
      }
    }
  }
};

// Scales of the rows l / 4 and l / 4 + 8 of a tile, for formats that are scaled within the sum.
template <typename SHAPE>
struct RowScales {
  float of[2];

  // column: the first of the group of spans. Not prefetched: a row's scales of many groups share a line of L1.
  __device__ __forceinline__ void load(const SkinnyGemmParams& p, const WorkRange& pass, int tile, int column) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int output = output_of<SHAPE>(pass, tile, half, threadIdx.x % 32 / 4);
      const bool exists = output < pass.end && column < p.in_features;
      of[half] = exists ? SHAPE::Format::load_scale(p, weight_row<SHAPE>(p, output, half), column) : 0.0f;
    }
  }
};

// The products of kGroup spans of 16 weight rows, which lie in two stages, with all tokens.
// from: shared addresses of the first span in rows l / 4 of the halves, plus 16 (l % 4).
template <typename SHAPE>
__device__ __forceinline__ void multiply_group(const uint32_t (&from)[2], int num_spans,
                                               const uint32_t (*x)[SHAPE::kColumns][SHAPE::Format::kSteps][2],
                                               float (&sums)[2][SHAPE::kColumns][4]) {
  using Format = typename SHAPE::Format;
  uint4 raw[SHAPE::kGroup][2];
#pragma unroll
  for (int span = 0; span < SHAPE::kGroup; ++span) {
    raw[span][0] = load_shared_16(from[0] + span * SHAPE::kSpanBytes);
    raw[span][1] = load_shared_16(from[1] + span * SHAPE::kSpanBytes);
  }
#pragma unroll
  for (int span = 0; span < SHAPE::kGroup; ++span) {
    if (span >= num_spans) break;
    uint32_t rows[2][Format::kSteps][2];
    Format::expand(raw[span][0], rows[0]);
    Format::expand(raw[span][1], rows[1]);
#pragma unroll
    for (int step = 0; step < Format::kSteps; ++step) {
      const uint32_t operand[4] = {rows[0][step][0], rows[1][step][0], rows[0][step][1], rows[1][step][1]};
#pragma unroll
      for (int column = 0; column < SHAPE::kColumns; ++column) {
        // Separate sums for even and odd steps halve the chain of dependent products.
        multiply_add<typename Format::Product>(sums[step % 2][column], operand, x[span][column][step][0],
                                              x[span][column][step][1]);
      }
    }
  }
}

template <typename SHAPE>
struct Consumer {
  const SkinnyGemmParams& p;
  uint32_t ring, barriers;   // shared addresses
  PipelineState<SHAPE::kStages> state;
  Activations<SHAPE> next_activations;   // of the next chunk, unless activations are resident
  Operands<SHAPE> operands[SHAPE::kResidentChunks];   // of all chunks, or of one
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __device__ __forceinline__ int first_column(int chunk) const {
    return chunk * SHAPE::kChunkElements + warp * SHAPE::kSliceElements;
  }

  // Call once, after the kernel that writes the activations has ended.
  __device__ __forceinline__ void load() {
    if constexpr (SHAPE::kIsResident) {
      Activations<SHAPE> all[SHAPE::kResidentChunks];
#pragma unroll
      for (int chunk = 0; chunk < SHAPE::kResidentChunks; ++chunk) all[chunk].load(p, first_column(chunk));
#pragma unroll
      for (int chunk = 0; chunk < SHAPE::kResidentChunks; ++chunk) all[chunk].arrange(operands[chunk]);
    } else {
      next_activations.load(p, first_column(0));
    }
  }

  __device__ __forceinline__ void consume_pass(const WorkRange& pass, Sums<SHAPE>& sums) {
    const int chunks = num_chunks<SHAPE>(p);
    if constexpr (SHAPE::kIsResident) {
#pragma unroll
      for (int chunk = 0; chunk < SHAPE::kResidentChunks; ++chunk) {
        if (chunk < chunks) consume_chunk(pass, chunk, operands[chunk], sums);
      }
    } else {
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        next_activations.arrange(operands[0]);
        // Loads one chunk ahead, to hide the latency of L2.
        next_activations.load(p, first_column(chunk + 1 == chunks ? 0 : chunk + 1));
        consume_chunk(pass, chunk, operands[0], sums);
      }
    }
  }

 private:
  __device__ __forceinline__ uint32_t wait_for_stage() const {
    wait_barrier(barriers + 8 * state.stage, state.parity);
    return ring + state.stage * SHAPE::kStageBytes + lane / 4 * SHAPE::kRowPitch +
           warp * SHAPE::kSpans * SHAPE::kSpanBytes + lane % 4 * 16;
  }

  __device__ __forceinline__ void consume_chunk(const WorkRange& pass, int chunk, const Operands<SHAPE>& x,
                                                Sums<SHAPE>& sums) {
    const int tiles = tiles_of_pass<SHAPE>(pass);
#pragma unroll
    for (int tile = 0; tile < SHAPE::kTiles; ++tile) {
      if (tile < tiles) consume_tile(pass, tile, first_column(chunk), x, sums.of[tile]);
    }
  }

  __device__ __forceinline__ void consume_tile(const WorkRange& pass, int tile, int column, const Operands<SHAPE>& x,
                                               float (&sums)[SHAPE::kColumns][4]) {
    const uint32_t low = wait_for_stage(), first = barriers + 8 * (state.stage + SHAPE::kStages);
    state.advance();
    const uint32_t high = wait_for_stage(), second = barriers + 8 * (state.stage + SHAPE::kStages);
    state.advance();
    const int num_spans = (p.in_features - column) / SHAPE::kSpanElements;
#pragma unroll
    for (int span = 0; span < SHAPE::kSpans; span += SHAPE::kGroup) {
      if (span >= num_spans) break;
      RowScales<SHAPE> scales;
      if constexpr (SHAPE::Format::kIsScaledInside) {
        scales.load(p, pass, tile, column + span * SHAPE::kSpanElements);
      }
      const uint32_t from[2] = {low + span * SHAPE::kSpanBytes, high + span * SHAPE::kSpanBytes};
      float parts[2][SHAPE::kColumns][4] = {};
      multiply_group<SHAPE>(from, num_spans - span, &x.pairs[span], parts);
#pragma unroll
      for (int n = 0; n < SHAPE::kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float part = parts[0][n][e] + parts[1][n][e];
          if constexpr (SHAPE::Format::kIsRescaled) part *= x.factors[n][e % 2];
          if constexpr (SHAPE::Format::kIsScaledInside) part *= scales.of[e / 2];
          sums[n][e] += part;
        }
      }
    }
    __syncwarp();
    if (lane == 0) {
      arrive(first);
      arrive(second);
    }
  }
};

}  // namespace slipstream
