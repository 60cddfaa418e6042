// Arguments of the weight-streaming product, as they cross the C ABI (mirrored in skinny_gemm.py).
// Pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

struct SkinnyGemmParams {
  const void* x;               // [num_tokens, in_features] of the operand type, row stride below
  const void* weight;          // [out_features, in_features], rows one after the other
  const void* scale;           // of the weight format: fp32 [out_features], fp32 blocks, or null
  const void* bias;            // [out_features] of the operand type, or null
  void* out;                   // [num_tokens, num_outputs] of the operand type, row stride below
  int32_t* queue;              // two zeros, left as zeros: CTAs take passes from it. Null: equal shares
  int64_t x_row_stride;        // elements, a multiple of 8
  int64_t out_row_stride;
  int64_t scale_row_stride;    // of block scales
  int32_t num_tokens;
  int32_t num_outputs;         // output columns: weight rows, or pairs of gate and up rows
  int32_t in_features;
  int32_t num_ctas;            // the grid: one CTA per SM
  int32_t is_dependent;        // launch before the kernel before it has ended
  int32_t tiles;               // the variant: 16-row tiles of one pass
  int32_t columns;             // the variant: tokens / 8, rounded up to a compiled number
  int32_t is_gated;            // the variant: out = silu(gate) * up
  int32_t is_resident;         // the variant: all activations stay in registers; at most 8 tokens, 4096 in_features
  int32_t copy_pace;           // bytes a clock of a CTA's early copies (copy_pace.cuh)
};
