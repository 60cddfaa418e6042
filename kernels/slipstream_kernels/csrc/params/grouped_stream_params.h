// Arguments of sm90_grouped_stream.cu, as moe/cuda/grouped_stream.py fills them.
// Device pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

namespace slipstream {

// None; those of a routing by which all experts have rows; those of what offsets holds by then.
enum GroupedGuess { kGuessNothing, kGuessAllExperts, kGuessByOffsets };

struct GroupedStreamParams {
  const void* x;             // [tokens or rows, in_features], row stride below
  const float* x_scale;      // FP8: of each row of x; of blocks: [in_features / 128][rows of x], stride below
  const int32_t* tokens;     // the row of x that each row of the product takes, or null: its own
  const int32_t* offsets;    // [num_experts + 1] first row of each expert
  const void* weight;        // [num_experts, out_features, in_features], contiguous
  const float* scale;        // FP8: [num_experts, out_features]; of blocks: [num_experts, scale_rows, scale_columns]
  void* out;                 // [rows, out_features, or half of them if gated] bf16
  int32_t* counters;         // two, zero before and after each launch
  int64_t x_row_stride;      // elements, a multiple of 16 bytes
  int64_t x_scale_stride;    // of blocks: from 128 columns to the next
  int32_t num_experts, out_features, in_features;   // of one expert
  int32_t is_gated, num_ctas, is_dependent;
  int32_t scale_rows, scale_columns;
  int32_t guess;             // which weights are copied before the kernel before has ended: GroupedGuess
  int32_t copy_pace;         // bytes a clock of a CTA's copies while the kernel before still runs; 0: as fast as it can
};

}  // namespace slipstream
