// The order of a CTA's weights, which producers and consumers walk in step. Plain arithmetic; its test compiles it for the
// host.
#pragma once

#include "schedule/skinny_gemm_shape.cuh"
#include "schedule/work_range.cuh"

namespace slipstream {

template <typename T>
__device__ __forceinline__ T smaller(T a, T b) {
  return a < b ? a : b;
}

__device__ __forceinline__ WorkRange outputs_of_cta(const SkinnyGemmParams& p, int cta) {
  const int64_t outputs = p.num_outputs;
  return {static_cast<int>(outputs * cta / p.num_ctas), static_cast<int>(outputs * (cta + 1) / p.num_ctas)};
}

template <typename SHAPE>
__device__ __forceinline__ WorkRange pass_at(int begin, const WorkRange& cta) {
  return {begin, smaller(begin + SHAPE::kOutputsPerPass, cta.end)};
}

template <typename SHAPE>
__device__ __forceinline__ int tiles_of_pass(const WorkRange& pass) {
  return smaller(SHAPE::kTiles, (pass.size() + SHAPE::kOutputsPerTile - 1) / SHAPE::kOutputsPerTile);
}

template <typename SHAPE>
__device__ __forceinline__ int num_chunks(const SkinnyGemmParams& p) {
  return (p.in_features + SHAPE::kChunkElements - 1) / SHAPE::kChunkElements;
}

// The output of row 0..7 of a half tile. Gated: the first half has gate rows, the second up rows.
template <typename SHAPE>
__device__ __forceinline__ int output_of(const WorkRange& pass, int tile, int half, int row) {
  return pass.begin + tile * SHAPE::kOutputsPerTile + (SHAPE::kIsGated ? row : 8 * half + row);
}

template <typename SHAPE>
__device__ __forceinline__ int weight_row(const SkinnyGemmParams& p, int output, int half) {
  return SHAPE::kIsGated ? output + half * p.num_outputs : output;
}

// Pass `index` of all CTAs' passes.
template <typename SHAPE>
__device__ __forceinline__ WorkRange pass_of_index(const SkinnyGemmParams& p, int index) {
  return pass_at<SHAPE>(index * SHAPE::kOutputsPerPass, {0, p.num_outputs});
}

template <typename SHAPE>
__device__ __forceinline__ int num_passes(const SkinnyGemmParams& p) {
  return (p.num_outputs + SHAPE::kOutputsPerPass - 1) / SHAPE::kOutputsPerPass;
}

// The weights of the next stage. A stage is half a tile; producers and consumers skip halves without rows.
template <typename SHAPE>
struct StageWalk {
  const SkinnyGemmParams& p;
  WorkRange pass;
  int chunk = 0, stage = 0;   // stage: of the chunk

  __device__ __forceinline__ StageWalk(const SkinnyGemmParams& params, const WorkRange& range) : p(params), pass(range) {}

  __device__ __forceinline__ bool is_done() const { return chunk >= num_chunks<SHAPE>(p); }

  __device__ __forceinline__ void advance() {
    if (++stage == 2 * tiles_of_pass<SHAPE>(pass)) stage = 0, ++chunk;
  }

  __device__ __forceinline__ int64_t row_bytes() const {
    return int64_t{p.in_features} * 16 / SHAPE::Format::kElements;
  }

  __device__ __forceinline__ uint32_t chunk_bytes() const {
    return smaller(row_bytes() - int64_t{chunk} * SHAPE::kChunkBytes, int64_t{SHAPE::kChunkBytes});
  }

  __device__ __forceinline__ int output(int row) const { return output_of<SHAPE>(pass, stage / 2, stage % 2, row); }

  // Existing rows of this stage.
  __device__ __forceinline__ int num_rows() const { return pass.end > output(0) ? smaller(pass.end - output(0), 8) : 0; }

  // Bytes from the beginning of the weight.
  __device__ __forceinline__ int64_t offset(int row) const {
    return weight_row<SHAPE>(p, output(row), stage % 2) * row_bytes() + int64_t{chunk} * SHAPE::kChunkBytes;
  }
};

}  // namespace slipstream
