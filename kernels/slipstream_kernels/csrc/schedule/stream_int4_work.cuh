// The run of a CTA in the streaming products with 4-bit weights (stream_w4a8, stream_w4a16): its part of the list of all chunks
// of all tiles, walked segment by segment, and what the host checks before the launch.
#pragma once

#include "schedule/stream_runs.cuh"

namespace slipstream {

template <typename SHAPE>
struct StreamInt4Work {
  using Params = typename SHAPE::Params;

  StreamRuns runs;
  int begin, end;

  __device__ __forceinline__ explicit StreamInt4Work(const Params& p)
      : runs{static_cast<uint32_t>(p.num_tiles), static_cast<uint32_t>(p.in_features / 128), gridDim.x},
        begin(runs.begin(blockIdx.x)), end(runs.begin(blockIdx.x + 1)) {}

  // Tiles of the same weight rows follow each other.
  static __device__ __forceinline__ StreamTile tile(const Params& p, int index) {
    const uint32_t rows = index / p.token_tiles, count = p.num_tiles / p.token_tiles;
    const uint32_t units = p.num_units;
    return {static_cast<int>(units * rows / count), static_cast<int>(units * (rows + 1) / count),
            static_cast<int>(index - rows * p.token_tiles) * SHAPE::kColumns};
  }

  // Calls function(segment, tile) for each segment of the run.
  template <typename FUNCTION>
  __device__ __forceinline__ void for_each_segment(const Params& p, const FUNCTION& function) const {
#pragma unroll 1
    for (int position = begin; position < end;) {
      const StreamSegment segment = runs.segment_at(position, end);
      function(segment, tile(p, segment.tile));
      position += segment.end_chunk - segment.begin_chunk;
    }
  }
};

// Runs are not empty, tiles fit a CTA and hold all tokens, and products of StreamRuns fit 32 bits.
template <typename SHAPE>
bool runs_fit(const typename SHAPE::Params& p) {
  if (p.token_tiles < 1 || p.num_tiles < 1 || p.num_tiles % p.token_tiles != 0 || p.num_ctas < 1) return false;
  const int64_t total = int64_t{p.num_tiles} * (p.in_features / 128), of_rows = p.num_tiles / p.token_tiles;
  const bool is_split = p.num_tiles % p.num_ctas != 0;
  return p.num_tokens <= int64_t{p.token_tiles} * SHAPE::kColumns && of_rows <= p.num_units &&
         (p.num_units + of_rows - 1) / of_rows <= SHAPE::kUnits && p.num_ctas <= total &&
         (total + 1) * (p.num_ctas + int64_t{1}) < (int64_t{1} << 32) &&
         p.num_units * (of_rows + 1) < (int64_t{1} << 32) &&
         (!is_split || (p.partial_sums != nullptr && p.counters != nullptr));
}

}  // namespace slipstream
