// The consumer warps: each multiplies its own columns of every slot by all tokens; their sums are added at the end of a
// pass, in a fixed order.
#pragma once

#include "hopper_copy.cuh"
#include "stream_shape.cuh"
#include "warp_mma.cuh"

namespace slipstream {

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}

// Not through the read-only path: an earlier kernel may write these bytes while this one has begun.
__device__ __forceinline__ uint4 load_global_16(const void* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}

// One warp's activations of a chunk, as they lie in memory: lane l holds those of token l / 4 of each column.
template <typename SHAPE>
struct Activations {
  static constexpr int kVectors = SHAPE::Format::kElements / 8;
  uint4 raw[SHAPE::kSpans][SHAPE::kColumns][kVectors];

  // first: the warp's first column. Tokens and columns that do not exist are zero.
  __device__ __forceinline__ void load(const StreamParams& p, int first) {
    const int lane = threadIdx.x % 32;
    using T = typename SHAPE::Operand;
#pragma unroll
    for (int span = 0; span < SHAPE::kSpans; ++span) {
#pragma unroll
      for (int column = 0; column < SHAPE::kColumns; ++column) {
        const int token = 8 * column + lane / 4, start = first + span * SHAPE::kSpanElements;
        const bool exists = token < p.num_tokens && start < p.in_features;
        const T* from = static_cast<const T*>(p.x) + token * p.x_row_stride + start + lane % 4 * SHAPE::Format::kElements;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          raw[span][column][i] = exists ? load_global_16(from + 8 * i) : make_uint4(0, 0, 0, 0);
        }
      }
    }
  }
};

// A pass's sums of one warp: sums[tile][column] as mma lays them out, rows l / 4 and l / 4 + 8, tokens 2 (l % 4) + 0, 1.
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

// Adds one slot's products of this warp. slot: shared address of the warp's columns in row l / 4, plus 16 (l % 4).
template <typename SHAPE>
__device__ __forceinline__ void multiply_slot(uint32_t slot, int num_spans, const Activations<SHAPE>& x,
                                              float (&sums)[SHAPE::kColumns][4]) {
  using Format = typename SHAPE::Format;
#pragma unroll
  for (int span = 0; span < SHAPE::kSpans; ++span) {
    if (span >= num_spans) break;
    const uint32_t address = slot + span * SHAPE::kSpanBytes;
    uint32_t low[Format::kSteps][2], high[Format::kSteps][2];
    Format::expand(load_shared_16(address), low);
    Format::expand(load_shared_16(address + 8 * SHAPE::kRowPitch), high);
#pragma unroll
    for (int column = 0; column < SHAPE::kColumns; ++column) {
      uint32_t tokens[Format::kSteps][2];
      Format::arrange(x.raw[span][column], tokens);
#pragma unroll
      for (int step = 0; step < Format::kSteps; ++step) {
        const uint32_t operand[4] = {low[step][0], high[step][0], low[step][1], high[step][1]};
        multiply_add<typename SHAPE::Operand>(sums[column], operand, tokens[step][0], tokens[step][1]);
      }
    }
  }
}

// Scales of the rows l / 4 and l / 4 + 8 of a tile, for formats that are scaled within the sum.
template <typename SHAPE>
struct RowScales {
  float of[2] = {1.0f, 1.0f};

  // column: the warp's first of the chunk. Not read ahead: a row's scales of many chunks share a line of L1.
  __device__ __forceinline__ void load(const StreamParams& p, const UnitRange& pass, int tile, int column) {
    if constexpr (SHAPE::Format::kIsScaledInside) {
      static_assert(SHAPE::kSliceElements <= SHAPE::Format::kScaleElements, "a warp's columns of a chunk share a scale");
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = threadIdx.x % 32 / 4 + 8 * half, unit = unit_of<SHAPE>(pass, tile, row);
        const bool exists = unit < pass.end && column < p.in_features;
        of[half] = exists ? SHAPE::Format::load_scale(p, weight_row<SHAPE>(p, unit, row), column) : 0.0f;
      }
    }
  }
};

template <typename SHAPE>
struct Consumer {
  const StreamParams& p;
  uint32_t ring, barriers;   // shared addresses
  RingPlace<SHAPE::kSlots> place;
  Activations<SHAPE> x;      // of the next chunk
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __device__ __forceinline__ int first_column(int chunk) const {
    return chunk * SHAPE::kChunkElements + warp * SHAPE::kSliceElements;
  }

  __device__ __forceinline__ void consume_pass(const UnitRange& pass, Sums<SHAPE>& sums) {
    const int chunks = num_chunks<SHAPE>(p), tiles = tiles_of_pass<SHAPE>(pass);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const Activations<SHAPE> now = x;
      // Read one chunk ahead: the latency of L2 passes while this chunk is multiplied.
      x.load(p, first_column(chunk + 1 == chunks ? 0 : chunk + 1));
#pragma unroll
      for (int tile = 0; tile < SHAPE::kTiles; ++tile) {
        if (tile < tiles) consume_slot(pass, tile, first_column(chunk), now, sums.of[tile]);
      }
    }
  }

 private:
  __device__ __forceinline__ void consume_slot(const UnitRange& pass, int tile, int column,
                                               const Activations<SHAPE>& now, float (&sums)[SHAPE::kColumns][4]) {
    const uint32_t filled = barriers + 8 * place.stage;
    const uint32_t slot = ring + place.stage * SHAPE::kSlotBytes + lane / 4 * SHAPE::kRowPitch +
                          warp * SHAPE::kSpans * SHAPE::kSpanBytes + lane % 4 * 16;
    const int num_spans = (p.in_features - column) / SHAPE::kSpanElements;
    RowScales<SHAPE> scales;
    scales.load(p, pass, tile, column);
    wait_barrier(filled, place.parity);
    if constexpr (SHAPE::Format::kIsScaledInside) {
      float parts[SHAPE::kColumns][4] = {};
      multiply_slot<SHAPE>(slot, num_spans, now, parts);
#pragma unroll
      for (int n = 0; n < SHAPE::kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[n][e] += parts[n][e] * scales.of[e / 2];
      }
    } else {
      multiply_slot<SHAPE>(slot, num_spans, now, sums);
    }
    __syncwarp();
    if (lane == 0) arrive(filled + 8 * SHAPE::kSlots);
    place.advance();
  }
};

}  // namespace slipstream
