// Arguments of the kernel of ragged attention, as they cross the C ABI (mirrored in ragged_attention.py): those of the
// prefill kernel, its caches being [num_keys, heads, width] here, its lengths those of keys, and what follows.
#pragma once

#include "params/prefill_params.h"

struct RaggedParams : PrefillParams {
  const void* shared_keys;      // [num_keys, rope_dim]: the part of a key that all heads share
  const int32_t* key_start_loc; // [num_requests + 1]
  float* lse;                   // [num_tokens, num_q_heads]
  int64_t key_token_stride;
  int64_t key_head_stride;
  int64_t value_token_stride;
  int64_t value_head_stride;
  int64_t shared_token_stride;
  int32_t num_keys;
  int32_t is_causal;            // else each query sees all keys of its request
};
