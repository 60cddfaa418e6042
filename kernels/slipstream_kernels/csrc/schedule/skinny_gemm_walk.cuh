// The weights of a CTA in their order: the walk that its producers and its consumers make in step. Plain
// arithmetic, also compiled for the host by its test.
#pragma once

#include "schedule/skinny_gemm_shape.cuh"
#include "schedule/unit_range.cuh"

namespace slipstream {

template <typename T>
__device__ __forceinline__ T smaller(T a, T b) {
  return a < b ? a : b;
}

__device__ __forceinline__ UnitRange units_of_cta(const SkinnyGemmParams& p, int cta) {
  const int64_t units = p.num_units;
  return {static_cast<int>(units * cta / p.num_ctas), static_cast<int>(units * (cta + 1) / p.num_ctas)};
}

template <typename SHAPE>
__device__ __forceinline__ UnitRange pass_at(int begin, const UnitRange& cta) {
  return {begin, smaller(begin + SHAPE::kUnitsPerPass, cta.end)};
}

template <typename SHAPE>
__device__ __forceinline__ int tiles_of_pass(const UnitRange& pass) {
  return smaller(SHAPE::kTiles, (pass.size() + SHAPE::kUnitsPerTile - 1) / SHAPE::kUnitsPerTile);
}

template <typename SHAPE>
__device__ __forceinline__ int num_chunks(const SkinnyGemmParams& p) {
  return (p.in_features + SHAPE::kChunkElements - 1) / SHAPE::kChunkElements;
}

// The unit of row 0..7 of a half tile, and its row of the weight. Gated: the first half has gate rows, the second up
// rows.
template <typename SHAPE>
__device__ __forceinline__ int unit_of(const UnitRange& pass, int tile, int half, int row) {
  return pass.begin + tile * SHAPE::kUnitsPerTile + (SHAPE::kIsGated ? row : 8 * half + row);
}

template <typename SHAPE>
__device__ __forceinline__ int weight_row(const SkinnyGemmParams& p, int unit, int half) {
  return SHAPE::kIsGated ? unit + half * p.num_units : unit;
}

// The pass of that number, of all passes of all CTAs.
template <typename SHAPE>
__device__ __forceinline__ UnitRange pass_of_index(const SkinnyGemmParams& p, int index) {
  return pass_at<SHAPE>(index * SHAPE::kUnitsPerPass, {0, p.num_units});
}

template <typename SHAPE>
__device__ __forceinline__ int num_passes(const SkinnyGemmParams& p) {
  return (p.num_units + SHAPE::kUnitsPerPass - 1) / SHAPE::kUnitsPerPass;
}

// Where the next slot's weights lie. A slot is half a tile; halves without rows are skipped here as by the consumers.
template <typename SHAPE>
struct SlotWalk {
  const SkinnyGemmParams& p;
  UnitRange pass;
  int chunk = 0, slot = 0;   // slot: of the chunk

  __device__ __forceinline__ SlotWalk(const SkinnyGemmParams& params, const UnitRange& range) : p(params), pass(range) {}

  __device__ __forceinline__ bool is_done() const { return chunk >= num_chunks<SHAPE>(p); }

  __device__ __forceinline__ void advance() {
    if (++slot == 2 * tiles_of_pass<SHAPE>(pass)) slot = 0, ++chunk;
  }

  __device__ __forceinline__ int64_t row_bytes() const {
    return int64_t{p.in_features} * 16 / SHAPE::Format::kElements;
  }

  __device__ __forceinline__ uint32_t chunk_bytes() const {
    return smaller(row_bytes() - int64_t{chunk} * SHAPE::kChunkBytes, int64_t{SHAPE::kChunkBytes});
  }

  __device__ __forceinline__ int unit(int row) const { return unit_of<SHAPE>(pass, slot / 2, slot % 2, row); }

  // Rows of this slot; the sums of rows that do not exist are dropped.
  __device__ __forceinline__ int num_rows() const { return pass.end > unit(0) ? smaller(pass.end - unit(0), 8) : 0; }

  // Bytes from the beginning of the weight.
  __device__ __forceinline__ int64_t offset(int row) const {
    return weight_row<SHAPE>(p, unit(row), slot % 2) * row_bytes() + int64_t{chunk} * SHAPE::kChunkBytes;
  }
};

}  // namespace slipstream
