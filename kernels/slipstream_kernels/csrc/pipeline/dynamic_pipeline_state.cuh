// PipelineState of a ring whose number of stages is known at run time.
#pragma once

#include <cstdint>

namespace slipstream {

// A position in a ring of num_stages buffers, and the parity of its current round.
struct DynamicPipelineState {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int num_stages) {
    if (++stage == num_stages) stage = 0, parity ^= 1;
  }
};

}  // namespace slipstream
