// Arguments of slipstream_int4_experts, as moe/cuda/int4_experts.py fills them. Pointers are device pointers.
// Pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

namespace slipstream {

struct ExpertParams {
  const void* x;                // [tokens or rows, in_features] bf16, fp16 or e4m3, row stride below
  const float* x_scale;         // of each row of x, or null: 1
  const int32_t* tokens;        // the row of x that each row of the product takes, or null: its own
  const int32_t* offsets;       // [num_experts + 1] first row of each expert
  const uint4* codes;           // of all experts: [pair of blocks of 128][strip of 16][block][lanes of w4a8_layout.cuh]
  const uint32_t* words;        // [pair of blocks][num_experts * out_features][block][groups of a block]
  const float* channel_scale;   // [num_experts * out_features]
  void* out;                    // [rows, out_features, or half of them if gated]
  void* arranged;               // [most tiles][pairs of blocks][kRowBytes]: x in the order of the products
  float* tile_scale;            // [most tiles][kTileRows]
  int64_t x_row_stride;         // elements, a multiple of 16 bytes
  int32_t num_experts, out_features, in_features;   // of one expert
  int32_t most_tiles;           // of rows that may be
  int32_t is_channelwise;       // words: [num_experts * out_features]
  int32_t out_is_half;          // of e4m3 rows: fp16, else bf16
  int32_t num_ctas, is_dependent;
  int32_t warpgroups_m;           // of record_experts: 64 rows each of a pass: 1, 2, 4
  int32_t num_rows, x_bytes;    // of record_experts: rows of the product, bytes of an element of x
};

}  // namespace slipstream
