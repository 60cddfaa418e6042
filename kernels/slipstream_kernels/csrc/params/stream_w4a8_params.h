// Arguments of slipstream_stream_w4a8, as gemm/cuda/stream_w4a8.py fills them.
// Pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

struct StreamW4A8Params {
  const void* x;              // [num_tokens, in_features] e4m3, row stride below
  const void* qweight;        // [in_features / 128][num_units] tiles of 1 KB (w4a8_layout.py)
  const void* group_scales;   // [blocks][out_features][groups of a block]: packed words of scale and zero point
  const float* x_scale;       // one per token
  const float* activation_sums;   // [tiles of 128 tokens][groups of input features][128]
  const float* scale;         // one per weight row, which the others are relative to
  const void* bias;           // [out_features] of the result's type, or null
  void* out;                  // [num_tokens, out_features], row stride below
  float* partial_sums;        // two slots a CTA of a tile's fp32 sums, or null if no tile is split
  int32_t* counters;          // four a tile, zeros; each launch leaves them so; or null if no tile is split
  int64_t x_row_stride;       // bytes, a multiple of 16
  int64_t out_row_stride;     // elements
  int32_t num_tokens;
  int32_t num_units;          // out_features / 16
  int32_t in_features;        // a multiple of 128
  int32_t num_tiles;          // of weight rows, times token_tiles
  int32_t token_tiles;        // which together hold all tokens
  int32_t num_ctas;           // at most num_tiles times the chunks of 128 columns
  int32_t is_channelwise;     // group_scales has one block, which holds for all
  int32_t is_dependent;       // launch before the kernel before it has ended
  int32_t copy_pace;          // bytes a clock of a CTA's early copies (copy_pace.cuh)
};
