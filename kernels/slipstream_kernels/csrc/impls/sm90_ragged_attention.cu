// Attention of prompts over keys and values that lie side by side, a part of each key being shared by all heads
// (un-absorbed latent attention), for Hopper (sm_90a): the prefill kernel with one head to a tile of rows.
// Contract: attention/ragged_attention.py.
//
// Built once per SLIPSTREAM_TYPE (__half, __nv_bfloat16), SLIPSTREAM_OWN_DIM, SLIPSTREAM_SHARED_DIM and
// SLIPSTREAM_VALUE_DIM.

#include "host/library.h"
#include "host/prefill_launch.cuh"
#include "pipeline/ragged_maps.cuh"

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_ragged_attention(const RaggedParams* params, void* stream) {
  using Shape = slipstream::RaggedShape<SLIPSTREAM_TYPE, SLIPSTREAM_OWN_DIM, SLIPSTREAM_SHARED_DIM,
                                        SLIPSTREAM_VALUE_DIM>;
  using Encoder = slipstream::RaggedMapEncoder<Shape>;
  return slipstream::launch_prefill<Shape, Encoder>(*params, static_cast<cudaStream_t>(stream));
}
