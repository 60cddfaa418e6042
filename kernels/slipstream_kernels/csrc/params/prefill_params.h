// Arguments of the prefill attention kernel, as they cross the C ABI (mirrored in prefill_attention.py).
// Pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

struct PrefillParams {
  const void* q;                // [num_tokens, num_q_heads, head_dim], strides below
  const void* key_cache;        // [num_blocks, num_kv_heads, block_size, head_dim]; staged ones: fp16
  const void* value_cache;      // [num_requests x staged_blocks, num_kv_heads, 64, head_dim], e4m3: [.., head_dim, 64]
  const float* key_scale;       // fp8: [num_kv_heads] or null; int8, int4: [num_blocks, num_kv_heads, block_size]
  const float* value_scale;
  void* out;                    // [num_tokens, num_q_heads, head_dim]
  const int32_t* block_tables;  // [num_requests, max_blocks]
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const float* alibi_slopes;    // [num_q_heads] or null
  const float* sinks;           // [num_q_heads] or null: scores without a value
  int32_t* counters;            // [2 + parts x warps], zero between calls
  float* parts;                 // [2 x num_sms, warpgroups, 68, 128] or null: no keys are split
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t table_stride;
  int64_t num_blocks;
  int32_t num_tokens;
  int32_t num_requests;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t block_size_log2;
  int32_t heads_per_section;    // packed heads whose keys and values the L2 cache holds at once
  int32_t sliding_window;       // 0: none
  int32_t num_sms;
  float scale;
  float soft_cap;               // 0: none
  int32_t staged_blocks;        // of a request, where keys or values are staged: blocks of 64 tokens in order
  int32_t pack_log2;            // query heads of one kv head that share a tile's rows, as a power of two
};
