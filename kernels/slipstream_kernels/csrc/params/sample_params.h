// Arguments of the sampling kernel, as they cross the C ABI (mirrored in sample/cuda/sample.py).
// Pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

struct SampleParams {
  const void* logits;           // [num_rows, vocab_size], row_stride apart
  int64_t* token_ids;           // [num_rows]
  const float* maxima;          // [num_rows, num_chunks]; these four are left by sample/triton/sample.py's first pass
  const float* sums;
  const int32_t* winners;
  const void* group_maxima;     // [num_rows, num_groups], of the logits' type
  const float* temperature;     // [num_rows]
  const int32_t* top_k;         // [num_rows] or null, as are the next two
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;
  const int64_t* positions;     // of the rows' own tokens
  int64_t row_stride;
  int32_t num_rows;
  int32_t vocab_size;
  int32_t num_chunks;
  int32_t num_groups;
  int32_t group_log2;           // tokens of a group, at least 8
  int32_t most;                 // groups that a row's candidates come from
  int32_t is_dependent;
};
