// Which CTA does what in the kernel of all layers: shares of weights and of keys, as plain arithmetic that producers and
// consumers make in step. Also compiled for the host by its test.
#pragma once

#include "params/layers_params.h"

namespace slipstream {

struct Range {
  int begin, end;

  __device__ __forceinline__ int size() const { return end - begin; }
};

// Even to one unit: rows of weights, pairs of gate and up rows, weight tiles of 16 rows or pairs of them.
__device__ __forceinline__ Range share_of_units(int units, int cta, int num_ctas) {
  const unsigned u = units, c = cta, n = num_ctas;   // products stay below 2^32: a division of 64 bits takes a while
  return {static_cast<int>(u * c / n), static_cast<int>(u * (c + 1) / n)};
}

template <typename T>
__device__ __forceinline__ T least(T a, T b) {
  return a < b ? a : b;
}

template <typename T>
__device__ __forceinline__ T most(T a, T b) {
  return a < b ? b : a;
}

// A product as the walk sees it. FORMAT: layers_formats.cuh. Whether it is gated is known at run time only: all products
// of a layer then share their code, of which an SM's instruction cache holds not much more than one copy.
template <typename FORMAT>
struct ProductWalk {
  using Format = FORMAT;
  static constexpr int kTiles = FORMAT::kIsTiled ? 4 : 3;   // of 16 rows of the weight, in a pass
  int num_units;   // of the output: rows, pairs of gate and up rows, weight tiles, pairs of weight tiles
  bool is_gated;

  __device__ __forceinline__ ProductWalk(int out_features, bool gated)
      : num_units(out_features / (FORMAT::kIsTiled ? 16 : 1) / (gated ? 2 : 1)), is_gated(gated) {}

  // Rows: 16 units a tile, gated 8 (8 rows of gate, the same of up). Weight tiles: one, gated one in two tiles.
  __device__ __forceinline__ int units_per_tile() const { return FORMAT::kIsTiled ? 1 : is_gated ? 8 : 16; }
  __device__ __forceinline__ int tiles_per_unit() const { return FORMAT::kIsTiled && is_gated ? 2 : 1; }
  __device__ __forceinline__ int units_per_pass() const { return kTiles / tiles_per_unit() * units_per_tile(); }

  __device__ __forceinline__ Range pass_at(int begin, const Range& share) const {
    return {begin, least(begin + units_per_pass(), share.end)};
  }

  __device__ __forceinline__ int num_tiles(const Range& pass) const {
    return FORMAT::kIsTiled ? pass.size() * tiles_per_unit() : (pass.size() + units_per_tile() - 1) / units_per_tile();
  }

  // The unit of a row (0..7) of half a tile; it exists if it lies within the pass.
  __device__ __forceinline__ int unit_of(const Range& pass, int tile, int half, int row) const {
    if constexpr (FORMAT::kIsTiled) return pass.begin + (is_gated ? tile / 2 : tile);
    return pass.begin + (is_gated ? tile * 8 + row : tile * 16 + 8 * half + row);
  }

  // Its row of the weight.
  __device__ __forceinline__ int weight_row(int unit, int tile, int half, int row) const {
    if constexpr (FORMAT::kIsTiled) return (unit + (is_gated ? tile % 2 * num_units : 0)) * 16 + 8 * half + row;
    return unit + (is_gated ? half * num_units : 0);
  }

  // Its column of the result.
  static __device__ __forceinline__ int out_column(int unit, int half, int row) {
    return FORMAT::kIsTiled ? unit * 16 + 8 * half + row : unit;
  }
};

template <typename FORMAT>
__device__ __forceinline__ int num_chunks(int in_features) {
  return (in_features + FORMAT::kChunk - 1) / FORMAT::kChunk;
}

__device__ __forceinline__ int out_features(const LayersParams& p, int product) {
  if (product == kGateUp) return 2 * p.intermediate_size;
  return product == kQkv ? p.qkv_size : p.hidden_size;
}

__device__ __forceinline__ int in_features(const LayersParams& p, int product) {
  if (product == kDown) return p.intermediate_size;
  return product == kOut ? p.q_size : p.hidden_size;
}

// Keys in pieces of TOKENS of one kv head of one request; a request has one at least, so that its rows are written. The
// pieces of all lie in a line, which CTAs share.
struct KeyUnit {
  int request, head;
  int seq_len;
  int start, num_pieces;   // on the line

  __device__ __forceinline__ int index(int num_kv_heads) const { return request * num_kv_heads + head; }
};

template <int TOKENS>
__device__ __forceinline__ int pieces_of(int seq_len) {
  return most(1, (seq_len + TOKENS - 1) / TOKENS);
}

template <int TOKENS>
__device__ __forceinline__ int count_pieces(const LayersParams& p) {
  int count = 0;
#pragma unroll 1
  for (int request = 0; request < p.num_tokens; ++request) count += pieces_of<TOKENS>(p.seq_lens[request]);
  return count * p.num_kv_heads;
}

__device__ __forceinline__ int pieces_of_share(const LayersParams& p, int total) {
  return most((total + p.num_ctas - 1) / p.num_ctas, p.min_share);
}

__device__ __forceinline__ Range share_of_pieces(int share, int total, int cta) {
  return {least(cta * share, total), least((cta + 1) * share, total)};
}

// The unit that a piece of the line belongs to.
template <int TOKENS>
__device__ __forceinline__ KeyUnit unit_of_piece(const LayersParams& p, int piece) {
  KeyUnit unit{0, 0, 0, 0, 1};
#pragma unroll 1
  for (int start = 0; unit.request < p.num_tokens; ++unit.request) {
    unit.seq_len = p.seq_lens[unit.request];
    unit.num_pieces = pieces_of<TOKENS>(unit.seq_len);
    const int end = start + unit.num_pieces * p.num_kv_heads;
    if (piece < end) {
      unit.head = (piece - start) / unit.num_pieces;
      unit.start = start + unit.head * unit.num_pieces;
      return unit;
    }
    start = end;
  }
  return unit;
}

// What a CTA has of the keys, the same in every layer.
struct KeyShare {
  int size;      // of every CTA but the last
  Range pieces;
  KeyUnit first;

  template <int TOKENS>
  static __device__ __forceinline__ KeyShare of_cta(const LayersParams& p, int cta) {
    const int total = count_pieces<TOKENS>(p), size = pieces_of_share(p, total);
    const Range pieces = share_of_pieces(size, total, cta);
    return {size, pieces, unit_of_piece<TOKENS>(p, pieces.begin)};
  }
};

// CTAs that share a unit, and where each leaves its part. A CTA has at most two shared units: one that came to it from
// the CTA before, and one that it hands on.
struct UnitParts {
  int first_cta, count;

  __device__ __forceinline__ UnitParts(const KeyUnit& unit, int share) {
    first_cta = unit.start / share;
    count = (unit.start + unit.num_pieces - 1) / share - first_cta + 1;
  }
  __device__ __forceinline__ int slot_of(int cta) const { return 2 * cta + (cta == first_cta ? 1 : 0); }
};

}  // namespace slipstream
