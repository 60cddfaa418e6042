// Arguments of the decode attention kernel, as they cross the C ABI (mirrored in decode_attention.py).
// Pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

struct DecodeParams {
  const void* q;                // [num_tokens, num_q_heads, head_dim], strides below
  const void* key_cache;        // [num_blocks, num_kv_heads, block_size, head_dim]
  const void* value_cache;
  void* out;                    // [num_tokens, num_q_heads, head_dim]
  const float* key_scale;       // int8, int4: [num_blocks, num_kv_heads, block_size]; fp8: [num_kv_heads] or null
  const float* value_scale;
  const int32_t* block_tables;  // [num_requests, max_blocks]
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const float* alibi_slopes;    // [num_q_heads] or null
  const float* sinks;           // [num_q_heads] or null: scores without a value
  const int64_t* tree_mask;     // [num_tokens] or null
  const int64_t* positions;     // [num_tokens] or null
  float* partial_out;           // [2 * grid, rows, head_dim], where the grid is at most 2 * num_sms
  float* partial_state;         // [2 * grid, rows, 2]: maximum (base 2), normaliser
  int32_t* arrivals;            // [grid], zero between calls
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t table_stride;
  int32_t num_requests;
  int32_t num_kv_heads;
  int32_t group;                // query heads of a kv head
  int32_t block_size_log2;
  int32_t sliding_window;       // 0: none
  int32_t num_sms;
  float scale;
  float soft_cap;               // 0: none
  int32_t is_dependent;         // launch before the kernel before it has ended
  int32_t is_prefix_settled;    // keys before this call's rows may be read before that kernel has ended
  int32_t rows;                 // of one tile: 8, 16, 24 or 32, at least max_query_len * group if that is less
};
