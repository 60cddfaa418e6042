// The entry points that every library has beside its kernel's. Included once in a library, by its source.
#pragma once

#include <cuda_runtime.h>

#define SLIPSTREAM_API extern "C" __attribute__((visibility("default")))

// CUDA's text for a number that an entry point returned.
SLIPSTREAM_API const char* slipstream_error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
