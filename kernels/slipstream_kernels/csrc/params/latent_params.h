// Arguments of the latent attention kernels, as they cross the C ABI (mirrored in latent_attention.py).
// Pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

struct LatentParams {
  const void* q;                // [num_tokens, num_heads, 576] bf16: absorbed queries
  const void* latent_cache;     // [num_blocks, 1, block_size, 576] bf16, the first 512 of a row its value; or FP8 rows
  void* out;                    // [num_tokens, num_heads, 512] bf16
  const int32_t* block_tables;  // [num_requests, max_blocks]
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int64_t* tree_mask;     // [num_tokens] or null
  float* partial_out;           // [2 x CTAs, 64, 512]: of rows whose keys several CTAs share
  float* partial_state;         // [2 x CTAs, 64, 2] maximum (base 2) and normaliser
  int32_t* plan;                // [num_tokens x num_heads, 2]: where the parts of a row lie, for the second kernel
  int32_t* arrivals;            // [CTAs] zeros, and zeros again afterwards; null: a second kernel adds up the parts
  int64_t table_stride;
  int64_t num_blocks;
  int32_t num_tokens;
  int32_t num_requests;
  int32_t num_heads;
  int32_t block_size_log2;      // 6 at least
  int32_t num_shares;           // equal parts of the line of all keys
  int32_t num_lanes;            // CTAs of a share, which take different rows of the same keys
  int32_t unit_cost;            // what a unit costs beside its tiles of keys, in tiles
  int32_t min_share;            // tiles of a share, at least
  int32_t slack;                // tiles that a share of equal units may be longer, to be whole units or an even part of one
  int32_t is_dependent;         // launch before the kernel before it has ended
  int32_t is_prefix_settled;    // keys before this call's rows may be read before that kernel has ended
  float scale;
};
