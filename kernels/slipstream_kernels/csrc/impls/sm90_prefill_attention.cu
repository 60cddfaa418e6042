// Causal attention of long queries (prompts and chunks of them) over a paged KV cache, for Hopper (sm_90a).
// Contract: attention/paged_attention.py.  Rows are (token, query head of one kv head) pairs.
//
// Built once per SLIPSTREAM_TYPE (__half, __nv_bfloat16), SLIPSTREAM_KV (PrefillKv), SLIPSTREAM_HEAD_DIM,
// SLIPSTREAM_SOFT_CAP and SLIPSTREAM_ALIBI.

#include "host/library.h"
#include "host/prefill_launch.cuh"
#include "pipeline/prefill_maps.cuh"

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_prefill_attention(const PrefillParams* params, void* stream) {
  using Shape = slipstream::PrefillShape<SLIPSTREAM_TYPE, static_cast<slipstream::PrefillKv>(SLIPSTREAM_KV),
                                         SLIPSTREAM_HEAD_DIM, SLIPSTREAM_SOFT_CAP, SLIPSTREAM_ALIBI>;
  using Encoder = slipstream::MapEncoder<Shape>;
  return slipstream::launch_prefill<Shape, Encoder>(*params, static_cast<cudaStream_t>(stream));
}
