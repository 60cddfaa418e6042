// How a list of chunks, tile by tile, is cut into equal runs, one for each CTA. Tests compile it for the host, too.
#pragma once

#include <cstdint>

#ifndef __CUDACC__
#define __device__
#define __forceinline__ inline
#endif

namespace slipstream {

// A run's chunks of one tile.
struct StreamSegment {
  int tile, begin_chunk, end_chunk;
};

// Units of weight rows, and tokens from the first on, of a tile.
struct StreamTile {
  int begin, end, first_token;
};

// All runs of a launch. The host sees to it that num_chunks num_tiles (num_runs + 1) fits 32 bits.
struct StreamRuns {
  uint32_t num_tiles, num_chunks, num_runs;   // chunks of a tile

  __device__ __forceinline__ uint32_t total() const { return num_tiles * num_chunks; }
  __device__ __forceinline__ int begin(uint32_t run) const { return static_cast<int>(total() * run / num_runs); }

  // The run that has this chunk of the list.
  __device__ __forceinline__ int owner(uint32_t chunk) const {
    return static_cast<int>(((chunk + 1) * num_runs - 1) / total());
  }

  // What a run that ends at `end` has of the tile at `position`, from there on.
  __device__ __forceinline__ StreamSegment segment_at(int position, int end) const {
    const int chunks = static_cast<int>(num_chunks), tile = position / chunks, first = tile * chunks;
    return {tile, position - first, end - first < chunks ? end - first : chunks};
  }
};

}  // namespace slipstream
