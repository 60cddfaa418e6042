// Arguments of the kernel that stages blocks for prefill attention, as they cross the C ABI (mirrored in
// prefill_stage.py).  Pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

struct PrefillStageParams {
  const void* key_cache;        // [num_blocks, num_kv_heads, block_size, head_dim] of 8 or 4 bits
  const void* value_cache;
  const float* key_scale;       // int8, int4: [num_blocks, num_kv_heads, block_size]
  const float* value_scale;
  void* keys;                   // fp16 [num_requests, staged_blocks, num_kv_heads, 64, head_dim]; null: not wanted
  void* values;
  const int32_t* block_tables;  // [num_requests, max_blocks]
  const int32_t* seq_lens;
  int64_t table_stride;
  int32_t num_requests;
  int32_t staged_blocks;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size_log2;
  int32_t kv_type;              // KvType
};
