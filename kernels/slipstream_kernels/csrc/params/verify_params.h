// Arguments of the verify attention kernel, as they cross the C ABI (mirrored in verify_attention.py).
// Pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

struct VerifyParams {
  const void* q;                // [num_tokens, num_q_heads, 128], strides below
  const void* key_cache;        // [num_blocks, num_kv_heads, block_size, 128] of q's type or e4m3
  const void* value_cache;
  void* out;                    // [num_tokens, num_q_heads, 128]
  const float* key_scale;       // e4m3: [num_kv_heads] or null
  const float* value_scale;
  const int32_t* block_tables;  // [num_requests, max_blocks]
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int64_t* tree_mask;     // [num_tokens] or null
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t table_stride;
  int32_t num_requests;
  int32_t num_kv_heads;
  int32_t group;                // query heads of a kv head
  int32_t block_size_log2;
  int32_t row_tiles;            // of 64 rows of a request and kv head, at most
  int32_t splits;               // CTAs of a cluster, which share the keys of a tile: 2, 4, 8 or 16
  int32_t is_dependent;         // launch before the kernel before it has ended
  int32_t is_prefix_settled;    // keys before this call's rows may be read before that kernel has ended
  float scale;
};
