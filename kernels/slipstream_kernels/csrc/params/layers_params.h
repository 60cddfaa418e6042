// Arguments of the kernel of all layers of a decode step, as they cross the C ABI (mirrored in decode_layers.py).
// Pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

#include "params/layers_tensors.h"

namespace slipstream {

struct LayersParams {
  const LayerTensors* layers;
  const void* embedded;           // [num_tokens, hidden_size] bf16: what the first layer reads
  void* residual;                 // [num_tokens, hidden_size] bf16: the sum of all layers' outputs, in the end the result
  void* heads;                    // [num_tokens, qkv_size] bf16
  void* attended;                 // [num_tokens, q_size] bf16
  void* activated;                // [num_tokens, intermediate_size] bf16
  float* partial_out;             // [2 * num_ctas, 8, 128]
  float* partial_state;           // [2 * num_ctas, 8, 2]: maximum (base 2), normaliser
  int32_t* arrivals;              // [num_tokens * num_kv_heads], zero between launches
  uint32_t* counters;             // 2, zero between launches: phases' ends, CTAs' ends
  const float* cos_sin;           // [positions, 128]: 64 cosines, then 64 sines
  const int64_t* positions;       // [num_tokens]
  const int64_t* slot_mapping;    // [num_tokens], -1: a token that is not stored
  const int32_t* seq_lens;        // [num_tokens], this token included; 0: a row that pads
  const int32_t* block_tables;    // [num_tokens, blocks], row stride below
  int64_t table_stride;
  int32_t num_layers;
  int32_t num_tokens;             // one of each request, 1..8
  int32_t hidden_size;
  int32_t qkv_size;
  int32_t q_size;
  int32_t intermediate_size;
  int32_t num_kv_heads;
  int32_t group;                  // query heads of a kv head, at most 8
  int32_t block_size_log2;
  int32_t num_ctas;               // all resident at once, one on each SM
  int32_t min_share;              // pieces of keys that a CTA takes at least
  int32_t slots_under_way;        // of the ring, that a CTA asks memory for at once
  float eps;
  float scale;                    // of scores
};

}  // namespace slipstream
