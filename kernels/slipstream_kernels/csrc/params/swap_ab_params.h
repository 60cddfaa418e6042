// Arguments of slipstream_swap_ab_gemm, as gemm/cuda/swap_ab_gemm.py fills them.
// Pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

struct SwapAbParams {
  const void* x;          // [num_tokens, in_features] of the operand type, row stride below
  const void* weight;     // [out_features, in_features] of the operand type, rows one after the other
  const float* x_scale;   // e4m3: one per token, or [in_features / 128][x_scale_stride] by groups; else null
  const float* scale;     // e4m3: one per weight row, or blocks, row stride below; else null
  const void* bias;       // [out_features] of the output type, or null
  void* out;              // [num_tokens, out_features, or half of them if gated], row stride below
  int64_t x_row_stride;   // elements, a multiple of 16 bytes
  int64_t out_row_stride;
  int64_t x_scale_stride; // of groups
  int64_t scale_stride;   // of blocks
  int32_t num_tokens;     // at most the columns of a tile
  int32_t num_units;      // out_features / 16
  int32_t in_features;
  int32_t is_dependent;   // launch before the kernel before it has ended
  int32_t tiles;          // the variant: 64 x columns sums that each of two warpgroups holds
  int32_t splits;         // the variant: CTAs of a cluster that split the summed dimension
  int32_t is_gated;       // the variant: out = silu(gate) * up
  int32_t copy_pace;      // bytes a clock of a CTA's early copies (copy_pace.cuh)
};
