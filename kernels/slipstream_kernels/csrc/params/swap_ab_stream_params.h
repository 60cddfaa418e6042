// Arguments of slipstream_swap_ab_stream, as gemm/cuda/swap_ab_stream.py fills them.
// Pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

struct SwapAbStreamParams {
  const void* x;          // [num_tokens, in_features] e4m3, row stride below
  const void* weight;     // [out_features, in_features] e4m3, rows one after the other
  const float* x_scale;   // one per token
  const float* scale;     // one per weight row
  const void* bias;       // [out_features] bf16, or null
  void* out;              // [num_tokens, out_features] bf16, row stride below
  float* partial_sums;    // two slots a CTA of a tile's fp32 sums, or null if no tile is split
  int32_t* counters;      // four a tile, zeros; each launch leaves them so; or null if no tile is split
  int64_t x_row_stride;   // elements, a multiple of 16 bytes
  int64_t out_row_stride;
  int32_t num_tokens;     // at most the columns of a tile
  int32_t num_units;      // out_features / 16
  int32_t in_features;
  int32_t is_dependent;   // launch before the kernel before it has ended
  int32_t num_tiles;      // of weight rows, as equal as units allow; a CTA multiplies one at a time
  int32_t num_ctas;       // at most num_tiles times the chunks of 128 columns
  int32_t copy_pace;      // bytes a clock of a CTA's early copies (copy_pace.cuh)
};
