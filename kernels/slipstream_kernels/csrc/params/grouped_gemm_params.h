// Arguments of the grouped GEMMs with 4-bit weights, as moe/cuda/grouped_gemm.py fills them.
// Device pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

namespace slipstream {

struct GroupedGemmParams {
  const void* x;                  // [tokens or rows, in_features] bf16, fp16 or e4m3, row stride below
  const float* x_scale;           // of each row of x, or null: 1
  const int32_t* tokens;          // the row of x that each row of the product takes, or null: its own
  const int32_t* offsets;         // [num_experts + 1] first row of each expert
  const uint4* qweight;           // of all experts, in the order of the kernel (int4_layout.py, grouped_w4a8_layout.py,
                                  // grouped_mxfp4_layout.py)
  const uint32_t* group_scales;   // W4A16: [pair of blocks][num_experts * out_features][block][groups of a block]
  const float* channel_scale;     // [num_experts * out_features]
  void* out;                      // [rows, out_features, or half of them if gated]
  void* permuted_x;               // workspace: for each tile of tokens, x in the order of the products
  float* row_scale;               // workspace: [max_token_tiles][kTileRows]
  int64_t x_row_stride;           // elements, a multiple of 16 bytes
  int32_t num_experts, out_features, in_features;   // of one expert
  int32_t max_token_tiles;        // tiles of tokens that the workspaces hold
  int32_t is_channelwise;         // W4A16: group_scales is [num_experts * out_features]
  int32_t out_is_half;            // of e4m3 rows: fp16, else bf16
  int32_t num_ctas, is_dependent;
  int32_t warpgroups_m;           // W4A8: 64 output features each, of a pass: 1, 2, 4
  int32_t num_rows, x_bytes;      // W4A8: rows of the product, bytes of an element of x
};

}  // namespace slipstream
